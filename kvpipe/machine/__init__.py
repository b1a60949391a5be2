"""This package reads the cores and the memory of the machine."""

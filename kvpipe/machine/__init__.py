"""This package knows the cores and the memory of the machine."""

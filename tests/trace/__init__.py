"""Tests of the modules that write and read traces."""

"""Tests of the packages that users install: the sdist and the wheel."""

"""Tests of the documentation's site, which is built from the pages."""

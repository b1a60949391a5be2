"""Tests of what reads a trace."""

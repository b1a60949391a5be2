"""Tests of `kvpipe/cli`."""

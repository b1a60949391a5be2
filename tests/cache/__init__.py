"""Tests of `kvpipe/cache`."""

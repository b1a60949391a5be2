"""Tests of `kvpipe/worker`."""

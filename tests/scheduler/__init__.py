"""Tests of `kvpipe/scheduler`."""

"""Tests of the management interface: its answers, its refusals, and its small cost for serving."""

"""Tests of the management interface: its answers and refusals, and that it does not slow serving down."""

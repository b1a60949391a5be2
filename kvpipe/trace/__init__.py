"""Counters, the structured log, and traces: recording, reading, replaying and drawing them."""

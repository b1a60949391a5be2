"""Scenarios on a real vLLM engine."""

"""Remedies for faults of vLLM's own, around the neutral core."""

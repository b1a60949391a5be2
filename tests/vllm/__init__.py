"""Tests of the vLLM connector."""

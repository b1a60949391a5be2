"""Unit tests: no engine, no vLLM."""

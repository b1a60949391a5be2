"""Unit tests: they use no engine and no vLLM."""

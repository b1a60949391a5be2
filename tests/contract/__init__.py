"""The contract with vLLM: recorded releases, and vLLM's real schedulers."""

"""The contract with vLLM: recorded releases, and its real schedulers."""

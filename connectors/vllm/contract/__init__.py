"""vLLM's connector contract, as data for each release, and what holds it against the sources."""

"""Property tests: what holds for every plan, sequence and interleaving."""

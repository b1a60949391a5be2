"""Property tests: statements that hold for every plan, sequence and interleaving."""

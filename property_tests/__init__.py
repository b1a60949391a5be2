"""Property tests: each states what must hold for every plan, sequence or interleaving that Hypothesis generates."""

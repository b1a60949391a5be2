"""vLLM's real scheduler and a connector on trial: moves, invariants, mutants."""

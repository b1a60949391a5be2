"""The scheduler's core under vLLM's real scheduler, and in replays of recorded requests."""

"""Tests of the scheduler side under vLLM's real scheduler, and in replays of recorded requests."""

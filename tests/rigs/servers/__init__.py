"""Real servers for tests of tiers, started on free ports of this machine."""

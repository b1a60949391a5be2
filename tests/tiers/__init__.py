"""Tests of tiers, each on its own and all together."""

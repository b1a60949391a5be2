"""Tests of each tier alone and of all tiers together."""

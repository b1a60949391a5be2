"""What is not collected with the other tests."""

collect_ignore = ["third_party_tier"]
"""Run by `tests/tiers/test_third_party.py`, where its package is installed."""

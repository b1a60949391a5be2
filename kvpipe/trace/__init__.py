"""Counters, the structured log, traces and what is made of them."""

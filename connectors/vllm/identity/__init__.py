"""Finds the facts on which the bytes of an engine's chunks depend: model, weights, layout, numerics."""

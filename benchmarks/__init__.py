"""The benchmarks: `python -m benchmarks [NAME...]`. Most compare a median with a baseline of the same run."""

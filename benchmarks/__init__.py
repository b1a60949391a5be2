"""The benchmarks. Most compare a median with a baseline of the same run. Run `python -m benchmarks [NAME...]`."""

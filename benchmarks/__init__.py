"""The benchmarks: medians, beside a baseline in the same run. `python -m benchmarks [NAME...]`."""

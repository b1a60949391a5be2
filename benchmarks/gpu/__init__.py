"""The benchmarks that need a GPU: of the data plane alone, and of whole engines."""

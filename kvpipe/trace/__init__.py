"""This package has the counters, the structured log, and the modules that record, read, replay and draw traces."""

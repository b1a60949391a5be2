"""Importable parts of tests: conformance suites, fake devices, tiers with faults, and transfer engines with faults."""

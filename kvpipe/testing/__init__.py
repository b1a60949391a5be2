"""Importable test parts: models made locally, a real engine with and without kvpipe, fault injection."""

"""The Redis and Valkey tier."""

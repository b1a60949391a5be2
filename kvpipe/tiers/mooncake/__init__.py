"""The Mooncake tier."""

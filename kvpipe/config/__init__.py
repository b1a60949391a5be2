"""This package has the settings, and makes objects from the settings."""

"""What happened, counted and logged: `Counters` for every reason, structlog for the story."""

"""Makes tiny models with random weights, runs engines with these models, and runs the demonstration."""

"""Where chunks live. Host memory is the tier that layerwise loads read."""

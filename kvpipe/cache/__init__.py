"""What the pool holds: which chunk is in which slot, which prefix is held, and what is evicted first."""

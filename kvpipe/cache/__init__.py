"""The pool's contents: which chunk is in which slot, which prefix is held, and which chunk is evicted first."""

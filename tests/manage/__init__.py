"""The management interface: what it answers, what it refuses, and that serving does not notice."""

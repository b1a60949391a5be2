"""The management interface: what it says, what it refuses, and that serving does not notice."""

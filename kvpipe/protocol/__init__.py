"""The objects that an engine offers, and the messages that the scheduler's side and the ranks exchange."""

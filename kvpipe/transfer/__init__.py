"""Moving bytes between paged KV blocks and host slots: the protocol is `base.py`, its engines stand beside it."""

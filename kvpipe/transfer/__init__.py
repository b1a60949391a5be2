"""This package copies between paged KV blocks and host slots. `base.py` is the protocol of the transfer engines."""

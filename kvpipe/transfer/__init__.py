"""Copies between paged KV blocks and host slots: the protocol in `base.py`, and the transfer engines."""

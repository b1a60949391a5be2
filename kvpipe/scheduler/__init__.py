"""The scheduler side looks up chunks, takes leases, and plans saves and loads.

The package depends on the protocols of `kvpipe.protocol.engine`, not on any engine.
"""

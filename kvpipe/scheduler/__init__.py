"""The scheduler side: looks up, leases, plans saves and loads. It knows no engine, only the protocols of `base`."""

"""The management interface of a running engine: state, switches, orders; HTTP on a Unix socket or a local port."""

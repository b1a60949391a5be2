"""The command `kvpipe`."""

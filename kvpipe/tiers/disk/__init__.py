"""The disk tier: one file per value, in a folder that any number of processes share."""

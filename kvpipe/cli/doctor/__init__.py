"""`kvpipe doctor`: what is there, what of it is wrong, and what to do about it."""

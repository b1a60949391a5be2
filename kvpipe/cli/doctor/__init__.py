"""`kvpipe doctor`: checks the environment, and names a remedy for each problem."""

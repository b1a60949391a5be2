"""`kvpipe doctor` checks the environment, and prints a remedy for each problem."""

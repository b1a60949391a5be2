"""`kvpipe doctor` checks the environment, and prints a solution for each problem."""

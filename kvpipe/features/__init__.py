"""Optional subscribers of the scheduler side. Requests are also saved and loaded without these subscribers."""

"""This package checks all input from outside kvpipe: values, small files, addresses, plug-ins."""

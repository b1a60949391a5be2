"""This package checks all input from outside kvpipe: values, small files, addresses and plug-ins."""

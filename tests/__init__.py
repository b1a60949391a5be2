"""The tests of kvpipe. Each folder has the tests of the folder of code with the same name."""

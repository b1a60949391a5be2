"""Tests of the transfer engines: on the CPU, on a simulated CUDA device, and on a real one if there is one."""

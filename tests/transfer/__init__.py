"""Tests of the transfer engines: on the CPU, on a simulated CUDA device, and on a real device if there is one."""

"""The transfer engines: one protocol, the CPU, a simulated CUDA device, and a real one where there is one."""

"""Signals to processes of tests."""

from __future__ import annotations

import os
import signal
import subprocess


def send(process: subprocess.Popen[bytes] | subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a child. After SIGSTOP, wait until all threads of the child have stopped."""
    process.send_signal(number)
    if number is signal.SIGSTOP:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

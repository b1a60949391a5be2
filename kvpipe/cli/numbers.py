"""Parsers of numbers on the command line.

The parsers raise `argparse.ArgumentTypeError`, which argparse prints with the option's name.
"""

from __future__ import annotations

import argparse
import math
import re


def count(text: str) -> int:
    """Parse a whole number that is at least 0."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: write a number from 0 on")
    return int(text)


def count_from_1(text: str) -> int:
    """Parse a whole number that is at least 1."""
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: write a number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """Parse a finite number of seconds."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds: write a number such as 30")
    return found

"""The two base classes of the errors that kvpipe raises, and their subclasses.

`UsageError`: the caller is wrong. This error is raised early, with one sentence that names the key, the value and the
remedy. `TransferError`: something outside of kvpipe has failed. This error fails one job and never reaches the engine.
"""

from __future__ import annotations


class UsageError(ValueError):
    """The caller is wrong. The message names what to change."""


class ConfigError(UsageError):
    """A configuration key is unknown, has a wrong value, or contradicts another."""


class UnsupportedError(UsageError):
    """kvpipe cannot serve this model, engine version or engine setting correctly."""


class TransferError(RuntimeError):
    """A copy, a tier or a worker failed."""

"""A check of a tier from this machine: open the tier, check its health, and write, read and delete a small value."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import anyio

from kvpipe.inputs import config_errors
from kvpipe.tiers.base import Get, Key, Put, Read, Tier, TierError
from kvpipe.tiers.envelope import HEADER_BYTES, DamagedError, Sealer, pages
from kvpipe.tiers.first_hash import ANY, read_first_hash
from kvpipe.tiers.keyring import secrets_of
from kvpipe.tiers.registry import make_tier
from kvpipe.tiers.spec import TierSpec

NAMESPACE = "0" * 32
"""The namespace of the value that a check writes.

No engine has this namespace, because namespaces of engines are hashes.
"""
PATIENCE = 4
"""The time limit for the whole check, in multiples of the tier's `timeout_ms_max`."""


def problem_of(name: str, spec: TierSpec) -> str:
    """Return the reason why a tier cannot be used, or "". Raises `ConfigError` if its configuration is wrong.

    The check removes every folder that it created.
    """
    tier, sealer = make_tier(name, spec, writes=spec.store != "never"), Sealer(secrets_of(spec))
    path = getattr(spec, "path", None)
    made = [one for one in (path, *path.parents) if not one.exists()] if isinstance(path, Path) else []
    try:
        return anyio.run(_problem, tier, sealer, spec)
    finally:
        with contextlib.suppress(OSError):  # fails if an engine uses the folder by now
            for one in made:
                one.rmdir()


async def _problem(tier: Tier, sealer: Sealer, spec: TierSpec) -> str:
    try:
        with anyio.fail_after(spec.timeout_ms_max * PATIENCE / 1000):
            await tier.open()
            await tier.health()
            return await _round_trip(tier, sealer) if spec.store != "never" else ""
    except TierError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {PATIENCE} x timeout_ms_max={spec.timeout_ms_max}"
    except Exception as error:  # noqa: BLE001  (the message names a bug in the tier)
        return f"{config_errors.pydantic_reason(repr(error))}: a bug in the tier, which may raise only TierError"
    finally:
        with anyio.move_on_after(PATIENCE, shield=True), contextlib.suppress(Exception):
            await tier.close()


def first_hash_in(name: str, spec: TierSpec) -> str:
    """Return the first hash that the last engine has stored in a tier, or "" if no hash can be read."""
    return anyio.run(_first_hash, make_tier(name, spec, writes=False), Sealer(secrets_of(spec)), spec)


async def _first_hash(tier: Tier, sealer: Sealer, spec: TierSpec) -> str:
    try:
        with anyio.fail_after(spec.timeout_ms_max * PATIENCE / 1000):
            await tier.open()
            return await read_first_hash(tier, sealer, ANY)
    except Exception:  # noqa: BLE001  (`problem_of` reports the failure)
        return ""
    finally:
        with anyio.move_on_after(PATIENCE, shield=True), contextlib.suppress(Exception):
            await tier.close()


async def _round_trip(tier: Tier, sealer: Sealer) -> str:
    key, body = Key(NAMESPACE, os.urandom(32), 0, 0, 1), pages(HEADER_BYTES)
    body[:16] = os.urandom(16)
    kept = bytes(body)
    await tier.write([Put(key, sealer.seal(key, 1, body))])
    header, back = pages(HEADER_BYTES), pages(len(kept))
    (read,) = await tier.read([Get(key, (header, back))])
    await tier.delete([key])
    if read is not Read.HIT:
        return f"the check wrote a value, but could not read it back ({read.value})"
    try:
        sealer.unseal(key, 1, header, back)
    except DamagedError as error:
        return f"the check read its value back damaged ({error})"
    return "" if bytes(back) == kept else "the check read back other bytes than it wrote"

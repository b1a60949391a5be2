"""Which weights an engine has, by every byte of their files: what is kept in a tier outlives the engine that wrote it.

The files are read in the background, at the rate at which memory is read if the engine has just loaded them, and what
they come to is remembered by path, size and time of change. Until it is known tiers are not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from kvpipe.names import default_state_dir
from kvpipe.trace.log import warn

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"})
_PIECE_BYTES: Final = 8 << 20
_KNOWN_MAX: Final = 10_000


class Weights:
    """Finds out, in a thread, and says so to `done`."""

    def __init__(self, config: VllmConfig, state_dir: Path | None, done: Callable[[str], object]) -> None:
        """Do not begin yet. `state_dir`: where to remember what files came to."""
        self._config, self._done = config, done
        self._known = (state_dir or default_state_dir()) / "weights.json"
        self._thread = threading.Thread(target=self._run, name="kvpipe-weights", daemon=True)

    def start(self, seconds_max: float) -> None:
        """Begin, and wait for so long: most models are done by then."""
        self._thread.start()
        self._thread.join(seconds_max)

    def _run(self) -> None:
        try:
            digest = self._digest()
        except Exception as error:  # noqa: BLE001  (tiers stay unused; the engine serves)
            warn("weights_not_read", error=repr(error), remedy="tiers are not used: let kvpipe read the model's files")
        else:
            self._done(digest)

    def _digest(self) -> str:
        model, load = self._config.model_config, self._config.load_config
        facts = [str(load.load_format)]
        if "dummy" in facts[0]:
            facts.append(str(model.seed))
        elif (folder := folder_of(str(model.model), model.revision)) is not None:
            facts += self._files(folder)
        else:  # streamed from elsewhere: there is nothing to read here
            facts += [str(model.model), str(model.revision)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _files(self, folder: Path) -> list[str]:
        """Return name and digest of every file of weights. One that cannot be read is nobody else's."""
        known: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            known = {str(key): str(value) for key, value in json.loads(self._known.read_text("utf-8")).items()}
        before, out = len(known), []
        for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
            real = path.resolve()
            at = real.stat()
            name = f"{real}:{at.st_size}:{at.st_mtime_ns}"
            if name not in known:
                known[name] = file_digest(real)
            out.append(f"{path.relative_to(folder)}:{known[name]}")
        if len(known) != before:
            with contextlib.suppress(OSError):
                self._known.parent.mkdir(parents=True, exist_ok=True)
                partial = self._known.with_name(f"{self._known.name}.{threading.get_native_id()}")
                partial.write_text(json.dumps(dict(list(known.items())[-_KNOWN_MAX:])), encoding="utf-8")
                partial.replace(self._known)
        return out


def folder_of(model: str, revision: str | None) -> Path | None:
    """Return the folder of a model's files: itself, or that of its commit in the hub's cache; None: neither."""
    if Path(model).is_dir():
        return Path(model)
    if Path(model).is_file():
        return Path(model).parent
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  (comes with vLLM)

    found = None
    with contextlib.suppress(ValueError):
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def file_digest(path: Path) -> str:
    """Return what all bytes of a file come to (xxh3-128): to tell weights apart, not to resist forgery."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(_PIECE_BYTES):
            digest.update(data)
    return digest.hexdigest()

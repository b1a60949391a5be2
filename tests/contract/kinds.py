"""Every kind of cache that vLLM defines: what kvpipe answers, on what that rests, what it stores and what that costs.

Run `python -m tests.contract.kinds` to write the page; the bytes on it are measured by `python -m tests.engine.costs`.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Final, NamedTuple

from kvpipe.testing import doc_tables

DOCS: Final = Path(__file__).parents[2] / "docs" / "models.md"
RESULTS: Final = DOCS.parent / "results" / "kinds.json"
INTERFACE: Final = "v1/kv_cache_interface.py"
BACKENDS: Final = "v1/attention/backends/registry.py"
STORED, REFUSED, INSIDE = "stored", "refused", "as its layers"

_ALL: Final = "page of every block: `page / block` a token"
_STATE: Final = "page of a boundary: nothing a token, `state` a boundary"


class Answer(NamedTuple):
    """What becomes of one kind of cache."""

    answer: str
    rests_on: str
    stored: str = ""


KINDS: Final[dict[str, Answer]] = {
    "FullAttentionSpec": Answer(STORED, "engine: `llama`, `gemma2-hybrid`", _ALL),
    "MLAAttentionSpec": Answer(STORED, "engine: `deepseek-mla`, `deepseek-v4` (4 and 128 tokens a latent)", _ALL),
    "SlidingWindowSpec": Answer(
        STORED,
        "engine: `mistral-sw`, `gemma2-hybrid`",
        "of each unit the blocks that `window - 1` tokens reach back to from its end, at most all: "
        "`page * ceil((window - 1) / block) / unit` a token",
    ),
    "SlidingWindowMLASpec": Answer(
        STORED, "engine: `deepseek-v4` (window, and rows of its compressors)", "as a sliding window"
    ),
    "ChunkedLocalAttentionSpec": Answer(STORED, "engine: `llama4`", _ALL),
    "MambaSpec": Answer("by `mamba_type`, below", "", ""),
    "UniformTypeKVCacheSpecs": Answer(INSIDE, "engine: `deepseek-v4`", "as its layers, each of its own size"),
    "HiddenStateCacheSpec": Answer(
        REFUSED, "the drafter that has it (`extract_hidden_states`) is refused; use `eagle3`"
    ),
    "RSWASpec": Answer(
        REFUSED,
        "which tokens are read depends on where the prompt ended, so that an answer's KV is none of a longer prompt; "
        "vLLM switches its prefix cache off, too",
    ),
    "SinkFullAttentionSpec": Answer(
        REFUSED,
        "its sinks lie in blocks 1 to n of the same cache, which vLLM's manager hands out to requests all the same: "
        "no engine has shown that a load leaves them",
    ),
    "CircularBufferSpec": Answer(
        REFUSED,
        "one ring a request, written over by its next tokens, that vLLM does not cache either (DeepSeek V4.1, "
        "GLM-5 Next, Qwen 4): DeepSeek V4 is what works",
    ),
    "CrossAttentionSpec": Answer(
        REFUSED,
        "its KV is of what the encoder saw, all of it, under no hash: vLLM gives its blocks neither hits nor external "
        "tokens, and a decoder's hash does not cover the audio; Qwen2-Audio, whose prompt has the audio, works",
    ),
    "EncoderOnlyAttentionSpec": Answer(REFUSED, "there is no KV cache: nothing to store"),
    "HiSparseHotSpec": Answer(
        REFUSED, "blocks on the device for KV that lies on the host; without `hisparse` it works"
    ),
    "HiSparseResidentSpec": Answer(REFUSED, "as `HiSparseHotSpec`"),
    "AttentionSpec": Answer(INSIDE, "only a base of others"),
}
"""By the name of vLLM's class."""

STATES: Final[dict[str, Answer]] = {
    "MAMBA2": Answer(STORED, "engine: `granite-hybrid`, `falcon-h1`", _STATE),
    "MAMBA1": Answer(STORED, "engine: `jamba`, its kernels written in torch, as vLLM's CPU build has none", _STATE),
    "GDN_ATTN": Answer(
        STORED,
        "engine: `qwen3-next` (gated delta net); `qwen3-next-kda` (in its place KDA of Kimi Linear and Kimi K3, its "
        "kernels written in torch; their MLA, of kernels for CUDA alone, was not run beside it)",
        _STATE,
    ),
    "SHORT_CONV": Answer(STORED, "engine: `lfm2`", _STATE),
    "LINEAR": Answer(REFUSED, "no engine has shown it; a gated delta net works"),
    "CUSTOM": Answer(REFUSED, "whatever a plugin registers; Mamba 2 works"),
}
"""By vLLM's name for the kind of state (`MambaSpec.mamba_type`)."""


def specifications(folder: Path) -> set[str]:
    """Return the classes of caches in vLLM's package in `folder`, wherever they are defined."""
    known, found = {"KVCacheSpec"}, {}
    for path in folder.rglob("*.py"):
        source = path.read_text(encoding="utf-8", errors="replace")
        if "Spec)" in source:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    found[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    while more := {name for name, bases in found.items() if bases & known} - known:
        known |= more
    return known - {"KVCacheSpec"}


def states(folder: Path) -> set[str]:
    """Return the kinds of recurrent states in vLLM's package in `folder`."""
    tree = ast.parse((folder / BACKENDS).read_text(encoding="utf-8"))
    (kinds,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "MambaAttentionBackendEnum")
    return {t.id for n in kinds.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}


def kinds_table() -> str:
    """Return one line per kind."""
    lines = ["| vLLM's kind | answer | rests on, or why | what is stored, and its cost |", "|---|---|---|---|"]
    named = {name: answer for name, answer in KINDS.items() if answer.rests_on or answer.stored or name == "MambaSpec"}
    named |= {f"MambaSpec, {name}": answer for name, answer in STATES.items()}
    lines += [f"| `{name}` | {one.answer} | {one.rests_on} | {one.stored} |" for name, one in named.items()]
    return "\n".join(lines) + "\n"


def bytes_table() -> str:
    """Return one line per family that an engine has run, with its measured bytes."""
    lines = ["| tests' model | tokens a unit | groups | bytes a token | bytes a boundary |", "|---|---|---|---|---|"]
    for name, one in json.loads(RESULTS.read_text(encoding="utf-8")).items():
        lines.append(f"| `{name}` | {one['unit']} | {one['groups']} | {one['token']:g} | {one['boundary']} |")
    return "\n".join(lines) + "\n"


def fill(text: str) -> str:
    """Return the page's text with the tables of kinds made anew."""
    return doc_tables.fill(text, {"kinds": kinds_table(), "bytes": bytes_table()})


if __name__ == "__main__":
    DOCS.write_text(fill(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{DOCS}\n")

"""Lists every kind of cache that vLLM defines: kvpipe's answer, the evidence, the stored bytes and their cost.

Run `python -m tests.contract.kinds` to write the page. `python -m tests.engine.costs` measures the bytes on the page.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Final, NamedTuple

from kvpipe.connectors.vllm.trial import doc_tables

DOCS: Final = Path(__file__).parents[2] / "docs" / "models.md"
RESULTS: Final = DOCS.parent / "results" / "kinds.json"
INTERFACE: Final = "v1/kv_cache_interface.py"
BACKENDS: Final = "v1/attention/backends/registry.py"
STORED, REFUSED, INSIDE = "stored", "refused", "as its layers"

_ALL: Final = "the page of every block: `page / block` per token"
_STATE: Final = "the page of a boundary: nothing per token, `state` per boundary"


class Answer(NamedTuple):
    """The answer of kvpipe to one kind of cache, with the evidence and the stored pages."""

    answer: str
    rests_on: str
    stored: str = ""


KINDS: Final[dict[str, Answer]] = {
    "FullAttentionSpec": Answer(STORED, "engine: `llama`, `gemma2-hybrid`", _ALL),
    "MLAAttentionSpec": Answer(STORED, "engine: `deepseek-mla`, `deepseek-v4` (4 and 128 tokens per latent)", _ALL),
    "SlidingWindowSpec": Answer(
        STORED,
        "engine: `mistral-sw`, `gemma2-hybrid`",
        "of each unit, the blocks of the unit's last `window - 1` tokens: "
        "`page * ceil((window - 1) / block) / unit` per token",
    ),
    "SlidingWindowMLASpec": Answer(
        STORED, "engine: `deepseek-v4` (window, and rows of compressors)", "as for a sliding window"
    ),
    "ChunkedLocalAttentionSpec": Answer(STORED, "engine: `llama4`", _ALL),
    "MambaSpec": Answer("by `mamba_type`, below", "", ""),
    "UniformTypeKVCacheSpecs": Answer(
        INSIDE, "engine: `deepseek-v4`", "as for its layers, each with its own page size"
    ),
    "HiddenStateCacheSpec": Answer(
        REFUSED, "the drafter with this cache (`extract_hidden_states`) is refused; use `eagle3`"
    ),
    "RSWASpec": Answer(
        REFUSED,
        "the window depends on where the prompt ended, so a longer prompt cannot reuse an answer's KV; vLLM disables "
        "its own prefix cache, too",
    ),
    "SinkFullAttentionSpec": Answer(
        REFUSED,
        "the attention sinks are in blocks 1 to n of the cache, which vLLM's manager also allocates to requests; no "
        "test shows that a load does not overwrite the sinks",
    ),
    "CircularBufferSpec": Answer(
        REFUSED,
        "a ring buffer per request, which the request's next tokens overwrite; vLLM does not cache it either "
        "(DeepSeek V4.1, GLM-5 Next, Qwen 4); DeepSeek V4 works",
    ),
    "CrossAttentionSpec": Answer(
        REFUSED,
        "the KV depends on the encoder's whole input, which no block hash covers, and vLLM gives these blocks neither "
        "hits nor external tokens; Qwen2-Audio, whose prompt contains the audio, works",
    ),
    "EncoderOnlyAttentionSpec": Answer(REFUSED, "such layers have no KV cache"),
    "HiSparseHotSpec": Answer(
        REFUSED, "blocks on the device for KV that is on the host; the model works without `hisparse`"
    ),
    "HiSparseResidentSpec": Answer(REFUSED, "as for `HiSparseHotSpec`"),
    "AttentionSpec": Answer(INSIDE, "only a base class of other kinds"),
}
"""The answers, by the name of vLLM's class."""

STATES: Final[dict[str, Answer]] = {
    "MAMBA2": Answer(STORED, "engine: `granite-hybrid`, `falcon-h1`", _STATE),
    "MAMBA1": Answer(
        STORED, "engine: `jamba`, with kernels written in torch, because vLLM's CPU build has none", _STATE
    ),
    "GDN_ATTN": Answer(
        STORED,
        "engine: `qwen3-next` (gated delta net); `qwen3-next-kda` (the same model with KDA of Kimi Linear and Kimi K3, "
        "with kernels written in torch; the MLA of these models has only CUDA kernels, so KDA was not run with MLA)",
        _STATE,
    ),
    "SHORT_CONV": Answer(STORED, "engine: `lfm2`", _STATE),
    "LINEAR": Answer(REFUSED, "not tested; a gated delta net works"),
    "CUSTOM": Answer(REFUSED, "a plugin may register any kind of state; Mamba 2 works"),
}
"""The answers for recurrent states, by vLLM's name for the kind of state (`MambaSpec.mamba_type`)."""


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
    lines = ["| vLLM's kind | answer | evidence, or reason | stored pages, and their bytes |", "|---|---|---|---|"]
    named = {name: answer for name, answer in KINDS.items() if answer.rests_on or answer.stored or name == "MambaSpec"}
    named |= {f"MambaSpec, {name}": answer for name, answer in STATES.items()}
    lines += [f"| `{name}` | {one.answer} | {one.rests_on} | {one.stored} |" for name, one in named.items()]
    return "\n".join(lines) + "\n"


def bytes_table() -> str:
    """Return one line per measured family of models, with the stored bytes."""
    head = "| tests' model | tokens per unit | groups | bytes per token | bytes per boundary |"
    lines = [head, "|---|---|---|---|---|"]
    for name, one in json.loads(RESULTS.read_text(encoding="utf-8")).items():
        lines.append(f"| `{name}` | {one['unit']} | {one['groups']} | {one['token']:g} | {one['boundary']} |")
    return "\n".join(lines) + "\n"


def fill(text: str) -> str:
    """Return the page's text with the tables of kinds generated again."""
    return doc_tables.fill_tables(text, {"kinds": kinds_table(), "bytes": bytes_table()})


if __name__ == "__main__":
    DOCS.write_text(fill(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{DOCS}\n")

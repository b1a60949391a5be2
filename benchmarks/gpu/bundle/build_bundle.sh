#!/usr/bin/env bash
# build_bundle.sh [DIR=.bundle] [VLLM_VERSION=0.33.0]
# Packs a vLLM, and what kvpipe and it need, that runs under Python 3.12 with torch 2.11 (CUDA 13, triton 3.6) on a
# Hopper GPU without a network: DIR/vllm.tar.xz. vLLM 0.33 links libtorch's stable ABI, so its compiled core runs under
# that torch although its metadata names a newer one. Left out: the code of other GPUs (fatprune.py), and compiled parts
# that a Llama-shaped model with Triton's or FA3's attention never calls.
# PRUNE=0 keeps the code of all GPUs: for a driver that refuses the pruned core.
set -euo pipefail
OUT=${1:-.bundle}
VERSION=${2:-0.33.0}
PRUNE=${PRUNE:-1}
PY=${PY:-python3}
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

# what vLLM imports, beside what is on the machine (numpy, transformers, tokenizers, fastapi's and aiohttp's needs, ...)
VLLM_NEEDS=(cbor2==6.2.1 pyzmq==27.3.0 openai==3.52.0 openai-harmony==0.0.8 httpx2==2.16.2 sniffio==1.3.1
  pybase64==1.5.1 cachetools==8.0.0 fastapi==0.136.3 starlette==1.10.0 partial-json-parser==0.2.1.1.post7
  compressed-tensors==0.17.0 loguru==0.7.3 xgrammar==0.2.8 apache-tvm-ffi==0.1.11)

PY=$PY "$HERE/wheels.sh" "$WORK" "vllm==$VERSION" "${VLLM_NEEDS[@]}"
S=$WORK/site
rm -rf "$S"/vllm/third_party/{deep_gemm,fmha_sm100} "$S"/vllm/_moe_C* "$S"/vllm/_flash*.so "$S"/vllm/_qutlass* \
  "$S"/vllm/_deepselect* "$S"/vllm/vllm_flash_attn/_vllm_fa2* "$S"/vllm/vllm-rs
if [ "$PRUNE" != 0 ]; then
  core=$S/vllm/_C_stable_libtorch.abi3.so
  "$PY" "$HERE/fatprune.py" "$core" "$core.pruned" 90
  mv "$core.pruned" "$core"
fi
cat > "$S/llguidance.py" <<'P'
"""Stands in for llguidance, which vLLM imports at start-up and uses for structured output only."""


class _Absent:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("llguidance is not in this bundle")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent
P
rm -f "$OUT"/vllm.tar.xz
tar -C "$WORK" -c site | xz -9 -T2 > "$OUT/vllm.tar.xz"
du -sh "$S"
ls -l "$OUT"

#!/usr/bin/env bash
# Every test, in two halves beside each other: those that start real engines, whose output comes at the end, and the others.
# tools/test.sh PROFILE
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONHASHSEED=0
engines=$(mktemp)
trap 'kill $(jobs -p) 2>/dev/null; rm -f "$engines"' EXIT

.venv/bin/python -m pytest tests/engine -q >"$engines" 2>&1 &
.venv/bin/python -m pytest tests/unit tests/trace tests/transfer tests/tiers property_tests -q --hypothesis-profile="$1" &&
  .venv/bin/python -m pytest tests/contract -q
others=$?
wait %1
engine=$?
cat "$engines"
[ "$others" = 0 ] && [ "$engine" = 0 ]

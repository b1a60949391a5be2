#!/usr/bin/env bash
# Every test: those that start real engines, whose output comes at the end, beside most others; then those of the contract, which tell
# hangs by the clock, alone. tools/test.sh PROFILE
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONHASHSEED=0
engines=$(mktemp)
trap 'kill $(jobs -p) 2>/dev/null; rm -f "$engines"' EXIT

.venv/bin/python -m pytest tests/engine -q >"$engines" 2>&1 &
.venv/bin/python -m pytest tests property_tests --ignore tests/engine --ignore tests/contract -q --hypothesis-profile="$1"
others=$?
wait %1
engine=$?
cat "$engines"
.venv/bin/python -m pytest tests/contract -q
contract=$?
[ "$others" = 0 ] && [ "$engine" = 0 ] && [ "$contract" = 0 ]

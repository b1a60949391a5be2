#!/usr/bin/env bash
# Every test, in parts, two at a time: a part's output comes when it ends, in one piece. Then, alone, what tells hangs by the
# clock, whose output comes at once. tools/test.sh PROFILE
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONHASHSEED=0 PROFILE=$1
clock=tests/contract/test_conformance.py
parts=( # the longest first
  "tests --ignore tests/engine --ignore tests/contract"
  "tests/engine"
  "property_tests"
  "tests/contract --ignore $clock"
)

part() {
  local output status began=$SECONDS
  output=$(mktemp)
  echo "pytest $1: begun"
  # shellcheck disable=SC2086  # words
  .venv/bin/python -m pytest -q --hypothesis-profile="$PROFILE" $1 >"$output" 2>&1
  status=$?
  echo "pytest $1: ended with $status after $((SECONDS - began)) s" >>"$output"
  flock tools cat "$output"
  rm "$output"
  return $status
}
export -f part

printf '%s\n' "${parts[@]}" | xargs -P 2 -d '\n' -I{} bash -c 'part "$1"' part {}
beside=$?
echo "pytest $clock: begun, alone"
.venv/bin/python -m pytest -q --hypothesis-profile="$PROFILE" $clock
alone=$?
[ "$beside" = 0 ] && [ "$alone" = 0 ]

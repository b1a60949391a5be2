#!/usr/bin/env bash
# Every test, in parts, two at a time: a part's output comes when it ends, in one piece. Then, alone, what tells hangs by the
# clock, whose output comes at once. tools/test.sh PROFILE
set -uo pipefail
set -m # a job is a process group, which ends as one
cd "$(dirname "$0")/.."
export PYTHONHASHSEED=0 PROFILE=$1
outputs=$(mktemp -d)
export outputs
clock=tests/contract/test_conformance.py
parts=( # the longest first
  "tests --ignore tests/engine --ignore tests/contract"
  "tests/engine"
  "property_tests"
  "tests/contract --ignore $clock"
)

tests() { # a test that hangs says where after ten minutes
  .venv/bin/python -m pytest -q --hypothesis-profile="$PROFILE" -o faulthandler_timeout=600 "$@"
}

part() {
  local output status began=$SECONDS
  trap : INT TERM # pytest gets them, too, and its output is shown
  output=$(mktemp -p "$outputs")
  echo "pytest $1: begun"
  # shellcheck disable=SC2086  # words
  tests $1 >"$output" 2>&1
  status=$?
  echo "pytest $1: ended with $status after $((SECONDS - began)) s" >>"$output"
  flock tools cat "$output"
  rm "$output"
  return $status
}
export -f tests part

beside() {
  printf '%s\n' "${parts[@]}" | xargs -P 2 -d '\n' -I{} bash -c 'part "$1"' part {}
}

attend() { # a command as a job, which a signal interrupts
  "$@" </dev/null &
  job=$!
  wait "$job"
}

stop() {
  trap '' INT TERM
  local signal
  for signal in INT TERM KILL; do
    kill -s "$signal" -- "-$job" 2>/dev/null || break
    for _ in {1..50}; do
      kill -s 0 -- "-$job" 2>/dev/null || break 2
      sleep 0.1
    done
  done
  exit "$1"
}
job=
trap 'rm -rf "$outputs"' EXIT
trap 'stop 130' INT
trap 'stop 143' TERM

attend beside
beside=$?
echo "pytest $clock: begun, alone"
attend tests $clock
alone=$?
[ "$beside" = 0 ] && [ "$alone" = 0 ]

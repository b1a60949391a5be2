#!/usr/bin/env bash
# Every test, in parts, one part after the other, each on all cores; `tools/test.sh quick` runs the first part alone.
# usage: tools/test.sh default|ci|nightly|quick
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
profile=$1
failed=()

part() { # part NAME ARGUMENTS…; a test that hangs says where after ten minutes
  local name=$1
  shift
  [ "$profile" = quick ] || echo "== $name"
  .venv/bin/python -m pytest -q -p tests.progress --part "$name" --hypothesis-profile="$hypothesis" \
    -o faulthandler_timeout=600 "$@"
  case $? in
    0) ;;
    2) exit 2 ;; # interrupted
    *) failed+=("$name") ;;
  esac
}

hypothesis=$profile
[ "$profile" = quick ] && hypothesis=default
# a worker runs whole files, in the order of tests/progress.py
spread=(-n auto --dist loadfile --no-loadscope-reorder)
clock=tests/contract/test_conformance.py # its tests tell hangs by the clock
slow=(tests/contract tests/vllm tests/trials tests/packages tests/site tests/second_engine)

ignored=()
for folder in tests/engine "${slow[@]}"; do ignored+=(--ignore "$folder"); done
part quick "${spread[@]}" --quick tests "${ignored[@]}"
if [ "$profile" != quick ]; then
  part schedulers "${spread[@]}" "${slow[@]}" property_tests --ignore "$clock"
  part engines "${spread[@]}" tests/engine
  part clock "$clock"
fi
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}"; exit 1; }

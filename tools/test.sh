#!/usr/bin/env bash
# Every test, in parts, one part after the other, each on all cores.
# usage: tools/test.sh default|ci|nightly   every test, with this profile of Hypothesis
#        tools/test.sh quick                the tests that need no vLLM, of files that take at most six seconds
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
profile=$1
failed=()

part() { # part NAME ARGUMENTS…; a test that hangs says where after ten minutes
  local name=$1
  shift
  .venv/bin/python -m pytest -q -p tests.progress --part "$name" --hypothesis-profile="${profile/quick/default}" \
    -o faulthandler_timeout=600 "$@"
  case $? in
    0) ;;
    2) exit 2 ;; # interrupted
    *) failed+=("$name") ;;
  esac
}

# a worker takes whole files, in the order of tests/progress.py
spread=(-n auto --dist loadfile --no-loadscope-reorder)
waiting=("${spread[@]}" -n "$((2 * $(nproc)))" --maxprocesses 16) # its tests wait for servers half of their time
clock=tests/contract/test_conformance.py # its tests tell hangs by the clock, so they run alone
with_vllm=(
  tests/contract tests/packages tests/second_engine tests/site tests/trials tests/vllm
  tests/manage/test_threads.py tests/unit/test_docs.py
  tests/cli/test_doctor.py::test_this_environment_passes
  tests/scheduler/test_adapters.py::test_vllm_reads_no_other_files
)
without_vllm=(tests --ignore tests/engine)
for one in "${with_vllm[@]}"; do
  case $one in *::*) without_vllm+=(--deselect "$one") ;; *) without_vllm+=(--ignore "$one") ;; esac
done

if [ "$profile" = quick ]; then
  part quick "${waiting[@]}" --no-vllm --file-seconds-max 6 "${without_vllm[@]}"
else
  part core "${waiting[@]}" --no-vllm "${without_vllm[@]}"
  part schedulers "${spread[@]}" "${with_vllm[@]}" --ignore "$clock"
  part properties -n "$((3 * $(nproc) / 2))" --maxprocesses 16 property_tests # its trials wait for threads now and then
  part engines "${spread[@]}" tests/engine
  part clock "$clock"
fi
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}"; exit 1; }

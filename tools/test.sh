#!/usr/bin/env bash
# Runs every test, in parts: one part after the other, each part on all cores.
# usage: tools/test.sh default|ci|nightly   every test, with this profile of Hypothesis
#        tools/test.sh quick                the tests that need no vLLM, of files that take at most 2.5 seconds
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
# Setup writes no bytecode; the first import of a module writes the module's bytecode. If this variable is set, as in
# many containers, no import writes bytecode. Every process that imports vLLM then compiles thousands of modules, and
# takes twice as long.
unset PYTHONDONTWRITEBYTECODE
profile=$1
seconds_max=900 # of one test that has no mark with another limit
[ "$profile" = nightly ] && seconds_max=18000 # twenty times the examples
failed=() # parts
lists=()  # files with the names of their tests

# part NAME ARGUMENTS…; a test that hangs prints its stacks after ten minutes, and fails after `seconds_max`
part() {
  local name=$1 status
  shift
  rm -f ".cache/tests/$name.failed"
  .venv/bin/python -m pytest -q -p tests.progress --part "$name" --hypothesis-profile="${profile/quick/default}" \
    -o faulthandler_timeout=600 --timeout $seconds_max "$@"
  status=$?
  case $status in
    0) ;;
    2) exit 2 ;; # interrupted
    *)
      failed+=("$name (pytest's exit status is $status)")
      lists+=(".cache/tests/$name.failed")
      ;;
  esac
}

# a worker takes whole files, in the order of tests/progress.py
spread=(-n auto --dist loadfile --no-loadscope-reorder)
waiting=("${spread[@]}" -n "$((2 * $(nproc)))" --maxprocesses 16) # these tests wait for servers half of their time
# three workers for two cores, because a test sometimes waits for threads, forked ranks or servers
workers=$((3 * $(nproc) / 2))
for_memory=$(awk '/MemAvailable/ { print int($2 / (3 * 1024 * 1024)) }' /proc/meminfo) # 3 GiB each
[ "$workers" -gt "$for_memory" ] && workers=$((for_memory > 1 ? for_memory : 1))
more=(-n "$workers" --maxprocesses 16)
clock=tests/contract/test_conformance.py # these tests detect hangs by the clock, so they run alone
with_vllm=(
  tests/contract tests/packages tests/second_engine tests/site tests/trials tests/vllm
  tests/manage/test_threads.py tests/node/test_metrics.py tests/scheduler/test_grouped_saves.py tests/transfer/test_whole_blocks.py
  tests/unit/test_docs.py
  tests/cli/test_doctor.py::test_this_environment_passes
  tests/scheduler/test_adapters.py::test_vllm_reads_no_other_files
)
without_vllm=(tests --ignore tests/engine)
for one in "${with_vllm[@]}"; do
  case $one in *::*) without_vllm+=(--deselect "$one") ;; *) without_vllm+=(--ignore "$one") ;; esac
done

# The parts without vLLM have more workers than cores. If each worker had several threads, torch would wait in a loop for
# threads that have no core.
if [ "$profile" = quick ]; then
  OMP_NUM_THREADS=1 part quick "${waiting[@]}" --no-vllm --file-seconds-max 2.5 "${without_vllm[@]}"
else
  OMP_NUM_THREADS=1 part core "${waiting[@]}" --no-vllm "${without_vllm[@]}"
  part vllm "${spread[@]}" "${more[@]}" "${with_vllm[@]}" tests/engine --ignore "$clock"
  part properties "${more[@]}" property_tests
  part clock "$clock"
fi
[ ${#failed[@]} = 0 ] && exit
cat "${lists[@]}" # printed last, because a log that is cut keeps its end
printf 'failed: %s\n' "${failed[@]}"
exit 1

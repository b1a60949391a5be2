#!/usr/bin/env bash
# Every test, in parts, one part after the other, each on all cores.
# usage: tools/test.sh default|ci|nightly   every test, with this profile of Hypothesis
#        tools/test.sh quick                the tests that need no vLLM, of files that take at most six seconds
set -uo pipefail
set -m # a job is a process group, which ends as one
cd "$(dirname "$0")/.."
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
profile=$1
failed=()

part() { # part NAME ARGUMENTS…; a test that hangs says where after ten minutes
  local name=$1
  shift
  .venv/bin/python -m pytest -q -p tests.progress --part "$name" --hypothesis-profile="${profile/quick/default}" \
    -o faulthandler_timeout=600 "$@"
  local status=$?
  [ $status = 2 ] && exit 2 # interrupted
  [ $status = 0 ] || failed+=("$name")
  return $status
}

shards() { # shards NAME ARGUMENTS…; as many processes as there are cores, each with every N-th test
  local name=$1 cores shard
  shift
  cores=$(nproc)
  local jobs=()
  for ((shard = 1; shard <= cores; shard++)); do
    part "$name-$shard" --shard "$shard/$cores" "$@" &
    jobs+=($!)
  done
  # shellcheck disable=SC2064  # these jobs
  trap "kill -INT ${jobs[*]/#/-}; exit 130" INT TERM
  for shard in "${jobs[@]}"; do wait "$shard" || failed+=("$name"); done
  trap - INT TERM
}

# a worker takes whole files, in the order of tests/progress.py
spread=(-n auto --dist loadfile --no-loadscope-reorder)
waiting=("${spread[@]}" -n "$((2 * $(nproc)))" --maxprocesses 16) # its tests wait for servers half of their time
clock=tests/contract/test_conformance.py # its tests tell hangs by the clock, so they run alone
forking=(property_tests/test_mutants.py property_tests/test_trials.py) # a worker has a thread, which no fork has
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
  part schedulers "${spread[@]}" "${with_vllm[@]}" property_tests --ignore "$clock" "${forking[@]/#/--ignore=}"
  shards forks "${forking[@]}"
  part engines "${spread[@]}" tests/engine
  part clock "$clock"
fi
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}"; exit 1; }

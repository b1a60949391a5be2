# make demo | test | bench | serve | lint: each sets up .venv by itself, once.
PY := .venv/bin/python
MODEL ?=
KVPIPE ?= {}
ARGS ?=
PROFILE ?= default
SECONDS_MAX ?= 3600
REQUESTS ?= 20000
MUTANTS ?=
.DEFAULT_GOAL := help
.PHONY: help setup programs demo test test-fast fuzz mutants soak bench bench-gpu serve lint format lock contract

help:
	@echo "make demo    a real vLLM engine with and without kvpipe, side by side"
	@echo "make test [PROFILE=default|ci|nightly]   every test"
	@echo "make fuzz [SECONDS_MAX=3600]   vLLM's real scheduler with random moves; goes on where the last run ended"
	@echo "make mutants [MUTANTS='NAME …']   bugs put back in, one at a time: the tests must find each"
	@echo "make soak [REQUESTS=20000]   a real engine with and without kvpipe: does what the process holds stay the same?"
	@echo "make bench   the benchmarks: a table and docs/results/*.json"
	@echo "make bench-gpu   the CUDA data plane, and a real vLLM on CUDA; needs an NVIDIA GPU"
	@echo "make serve MODEL=... [KVPIPE='{\"chunk_tokens\": 512}'] [ARGS=...]   the OpenAI-compatible server with kvpipe on"
	@echo "make lint    ruff and mypy"

setup:
	@tools/setup.sh

programs: setup
	@tools/setup.sh programs

demo: setup
	@$(PY) -m kvpipe.cli demo

test: setup programs
	@tools/test.sh $(PROFILE)

test-fast: setup programs
	PYTHONHASHSEED=0 $(PY) -m pytest tests/unit tests/trace tests/transfer tests/tiers property_tests -q -m "not slow"

fuzz: setup
	$(PY) -m kvpipe.testing.nightly --seconds $(SECONDS_MAX) --sequences property_tests/regressions \
	  --state .cache/fuzz.json --reach

mutants: setup
	$(PY) -m kvpipe.testing.mutate $(MUTANTS) --sequences property_tests/regressions --json docs/results/mutants.json
	$(PY) -m kvpipe.testing.page

soak: setup
	$(PY) -m kvpipe.testing.soak --requests $(REQUESTS) --json docs/results/soak.json

bench: setup programs
	$(PY) -m benchmarks

bench-gpu: setup
	$(PY) -m benchmarks.gpu
	$(PY) -m benchmarks.gpu.engine --json docs/results/gpu-engine.json

serve: setup
	@test -n "$(MODEL)" || { echo "say which model: make serve MODEL=path-or-name" >&2; exit 2; }
	@$(PY) -m kvpipe.cli check '$(KVPIPE)' >/dev/null
	$(PY) -m vllm.entrypoints.openai.api_server --model "$(MODEL)" $(ARGS) --kv-transfer-config \
	  '{"kv_connector":"KVPipeConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":$(KVPIPE)}'

lint: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lock:
	$(PY) -m pip freeze | grep -v -i -E '^(-e |kvpipe|setuptools|pip)' > requirements/cpu.lock

# does kvpipe fit every supported vLLM release, and, with VERSION=0.34.0, a new one?
contract: setup
	$(PY) tools/record_contract.py $(VERSION)
	PYTHONHASHSEED=0 $(PY) -m pytest tests/contract/test_contract.py tests/contract/test_vllm_tests.py -q

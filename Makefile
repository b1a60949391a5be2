# make help: what there is. Each sets up .venv by itself, once.
PY := .venv/bin/python
MODEL ?=
KVPIPE ?= {}
ARGS ?=
PART ?=
PROFILE ?= default
SECONDS_MAX ?= 3600
REQUESTS ?= 20000
MUTANTS ?=
FOLDER ?=
SAMPLE ?= 60
SEED ?= 0
.DEFAULT_GOAL := help
.PHONY: help setup programs demo test quick durations fuzz mutants propose-mutants soak bench bench-traces bench-gpu release serve lint format lock contract docs docs-packages

help:
	@echo "make demo    a real vLLM engine with and without kvpipe, side by side"
	@echo "make test [PROFILE=default|ci|nightly]   every test"
	@echo "make quick   every test that needs no vLLM, on all cores, in at most 90 seconds on two cores"
	@echo "make durations   write what the last tests took to tests/durations.json, by which they are ordered"
	@echo "make fuzz [SECONDS_MAX=3600]   vLLM's real scheduler with random moves; goes on where the last run ended"
	@echo "make mutants [MUTANTS='NAME …']   bugs put back in, one at a time: the tests must find each"
	@echo "make propose-mutants [FOLDER=kvpipe/scheduler] [SAMPLE=60] [SEED=0]   mutants by cosmic-ray: which share survives the quick tests?"
	@echo "make soak [REQUESTS=20000]   a real engine with and without kvpipe: does what the process holds stay the same?"
	@echo "make bench   the benchmarks: a table and docs/results/*.json"
	@echo "make bench-traces [ARGS='--share 0.25 --disk read_bytes_per_s=3e9 --json FILE …']   recorded traces against catalog, policies and tiers in virtual time: a page"
	@echo "make bench-gpu [PART='1 2']   what is to be measured on an NVIDIA GPU, three parts of at most 10 minutes; 4 and 5: more"
	@echo "make serve MODEL=... [KVPIPE='{\"chunk_tokens\": 512}'] [ARGS=...]   the OpenAI-compatible server with kvpipe on"
	@echo "make docs    the site, in .cache/site: pages, API reference, search; fails on a broken link or a stale page"
	@echo "make release VERSION=0.1.0   check, tag, build and write the notes into dist/; pushes nothing"
	@echo "make lint    ruff and mypy"
	@echo "make format  ruff's format and what it can mend"
	@echo "make lock    write what is installed to requirements/cpu.lock"
	@echo "make contract [VERSION=0.34.0]   does kvpipe fit every supported vLLM release, and a new one?"

setup:
	@tools/setup.sh

programs: setup
	@tools/setup.sh programs

docs-packages: setup
	@tools/setup.sh docs

docs: docs-packages
	PYTHONHASHSEED=0 $(PY) -m pytest -q -k is_fresh tests/unit tests/statemachine \
	  tests/contract/test_models_page.py
	$(PY) tools/docs_pages.py
	$(PY) -m sphinx -W --keep-going -q -b html docs .cache/site
	@echo "open .cache/site/index.html"

demo: setup
	@$(PY) -m kvpipe demo

test: setup programs docs-packages
	@tools/test.sh $(PROFILE)

quick: setup programs docs-packages
	@tools/test.sh quick

release: setup
	@$(PY) tools/release.py $(VERSION)

durations:
	$(PY) -m tests.progress

fuzz: setup
	$(PY) -m kvpipe.connectors.vllm.trial.nightly --seconds $(SECONDS_MAX) --sequences property_tests/regressions \
	  --state .cache/fuzz.json

mutants: setup
	$(PY) -m kvpipe.connectors.vllm.trial.mutants.mutate $(MUTANTS) --sequences property_tests/regressions --json docs/results/mutants.json \
	  --killers property_tests/killers.jsonl
	$(PY) -m kvpipe.connectors.vllm.trial.mutants.page

propose-mutants: setup
	@tools/setup.sh mutation
	PYTHONHASHSEED=0 .cache/mutation/bin/python tools/propose_mutants.py $(FOLDER) --sample $(SAMPLE) --seed $(SEED)
	$(PY) -m kvpipe.connectors.vllm.trial.mutants.page

soak: setup
	$(PY) -m kvpipe.connectors.vllm.trial.soak --requests $(REQUESTS) --json docs/results/soak.json

bench: setup programs
	$(PY) -m benchmarks

bench-traces: setup
	$(PY) -m benchmarks.replay $(ARGS)
	$(PY) -m benchmarks units

# with the machine's own Python where its torch has a GPU: such a machine may have no network to set up from
bench-gpu:
	@py=python3; $$py -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || \
	  { tools/setup.sh && py=$(PY); } || exit; \
	$$py -m benchmarks.gpu.runs $(foreach part,$(PART),--part $(part)) $(ARGS)

serve: setup
	@test -n "$(MODEL)" || { echo "say which model: make serve MODEL=path-or-name" >&2; exit 2; }
	flag=$$($(PY) -m kvpipe flag --as json '$(KVPIPE)') && \
	  $(PY) -m vllm.entrypoints.openai.api_server --model "$(MODEL)" $(ARGS) --kv-transfer-config "$$flag"

lint: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lock:
	$(PY) -m pip freeze --all --exclude pip --exclude kvpipe | grep -v -i -x -F -f requirements/docs.lock \
	  > requirements/cpu.lock

# does kvpipe fit every supported vLLM release, and, with VERSION=0.34.0, a new one?
contract: setup
	$(PY) -m tests.contract.record $(VERSION)
	PYTHONHASHSEED=0 $(PY) -m pytest tests/contract/test_contract.py tests/contract/test_vllm_tests.py -q

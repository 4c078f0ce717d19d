# Two commands are enough on a fresh machine: `make serve` and `make test`. Each sets up what it needs.

MODEL ?=
REPLICAS ?= 2
PORT ?= $(or $(INTELLECT_PORT),8000)
ADMIN_PORT ?= $(or $(INTELLECT_ADMIN_PORT),8001)
ENGINE ?= vllm
STATE_DIR ?=
BENCH ?=
SOAK ?=
SIM ?=
PLACEMENT ?=

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup serve test check bench sim placement soak clean

help:
	@echo 'make serve    a served model on http://127.0.0.1:$(PORT), with everything it needs'
	@echo '              variables: MODEL=FOLDER_OR_HUB_ID REPLICAS=$(REPLICAS) PORT=$(PORT) ADMIN_PORT=$(ADMIN_PORT)'
	@echo '              ENGINE=vllm|sim STATE_DIR=FOLDER'
	@echo 'make test     every test that needs no GPU'
	@echo 'make check    format, lint, types, import arrows'
	@echo 'make bench    what the router costs beside other routers (needs nginx and wrk; 8 minutes); writes docs/benchmarks.md'
	@echo '              variables: BENCH=ARGUMENTS, such as BENCH="--only requests --routers ours"; BENCH=--help lists them'
	@echo 'make sim      every placement policy on every workload, in a simulated fleet on virtual time'
	@echo '              variables: SIM=ARGUMENTS, such as SIM="--policy predicted --workload agents"; SIM=--help lists them'
	@echo 'make placement holds that simulator against the real router over HTTP, and against real vLLM on the CPU (6 minutes each)'
	@echo '              variables: PLACEMENT=CHECK, one of calibrate, http-order [default], real-rank; PLACEMENT=--help lists more'
	@echo 'make soak     mixed load while the replicas of the router fail at random, 20 minutes; fails if a promise is broken'
	@echo '              variables: SOAK=ARGUMENTS, such as SOAK="--minutes 5 --seed 7"; SOAK=--help lists them'
	@echo 'make setup    .venv with all dependencies; the others run it, and it is idempotent'
	@echo '              variables: ACCELERATOR=cpu|cuda PYTHON=INTERPRETER'
	@echo 'make clean    remove what setup and the tests made (models and checkpoints stay in ~/.cache/intellect)'

setup:
	@bash requirements/install.sh

serve: setup
	@exec $(BIN)/intellect up --port $(PORT) --admin-port $(ADMIN_PORT) --replicas $(REPLICAS) --engine $(ENGINE) \
		$(if $(MODEL),--model '$(MODEL)') $(if $(STATE_DIR),--state-dir '$(STATE_DIR)')

test: setup
	$(BIN)/pytest -m 'not gpu and not long'

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_arrows.py

bench: setup
	@exec $(BIN)/python -m loadtests.overhead $(BENCH)

sim: setup
	@exec $(BIN)/intellect sim $(or $(SIM),--workload all --duration 60)

placement: setup
	@exec $(BIN)/python -m loadtests.placement $(or $(PLACEMENT),http-order)

soak: setup
	@exec $(BIN)/python -m loadtests.soak $(SOAK)

clean:
	rm -rf .venv .bench-venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

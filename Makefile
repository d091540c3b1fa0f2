# `make` lists the targets. Each does all the set-up it needs: only Python 3.11+, make and the package index are expected.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup train test lint test-learning test-faults test-cluster bench-setup bench bench-gpu clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY)  ## make .venv with everything in it

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

train: setup  ## train PPO on CartPole-v1, evaluate it, draw its curves
	@$(BIN)/paceline train --env CartPole-v1 --name cartpole-$$(date +%Y%m%d-%H%M%S) --set eval.every_steps=10000
	@run=$$(ls -td runs/cartpole-* | head -n 1); \
		$(BIN)/paceline evaluate $$run && \
		$(BIN)/paceline plot $$run -o $$run/curves.png >/dev/null && \
		echo "picture    $$run/curves.png" && echo "run        $$run"

lint: setup  ## format, lint, types, layers
	$(BIN)/ruff format --check src tests benchmarks docs examples
	$(BIN)/ruff check src tests benchmarks docs examples
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/make_benchmarks.py --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: setup lint  ## the tests, two at a time; ten minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-learning: setup  ## every published score, over several seeds, two at a time; ten minutes
	$(BIN)/python -m pytest -n 2 -m learning tests/learning

test-faults: setup  ## workers killed, stopped and broken while they train; ten minutes
	$(BIN)/python -m pytest -m faults tests/engine tests/tune

test-cluster: setup  ## SLURM, OAR, MPI and ssh on hosts made on this machine, as root; ten minutes
	@[ "$$(id -u)" = 0 ] || { echo "make test-cluster makes hosts out of namespaces: run it as root"; exit 1; }
	@command -v ip >/dev/null || { echo "make test-cluster needs ip: apt-get install iproute2"; exit 1; }
	$(BIN)/python -m pytest -n 2 --dist loadfile -m cluster tests/cluster

bench-setup:  ## make the peers' environment
	sh benchmarks/peers.sh

BENCH = $(BIN)/python benchmarks/bench.py $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again) $(if $(QUICK),--quick) \
	$(if $(REPEATS),--repeats $(REPEATS))

bench: setup bench-setup  ## every figure of docs/benchmarks.md, on a quiet machine; 100 minutes on 2 cores; ONLY=dqn, AGAIN=1
	$(BENCH)

bench-gpu: setup  ## the figures that need a GPU; 45 minutes
	$(BENCH) --gpu

clean:  ## remove caches; runs and environments stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# `make` lists the targets. Each does all the set-up it needs: Python 3.11+, make and a package index are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup train test lint test-extending test-learning test-faults test-crashes test-cancels soak test-cluster bench-setup bench bench-gpu clean

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

test: setup lint  ## lint and the tests, three at a time; 15 minutes
	$(BIN)/python -m pytest -n 3 --dist loadfile

test-extending: setup  ## the tests again, in a clone where docs/extending.md has been followed; 15 minutes, or 5 with FAST=1
	@command -v git >/dev/null || { echo "make test-extending needs git: apt-get install git"; exit 1; }
	$(BIN)/python docs/apply_extending.py $(if $(FAST),--fast)

test-learning: setup  ## every published score, over several seeds, two at a time; 15 minutes
	$(BIN)/python -m pytest -n 2 -m learning tests/learning

test-faults: setup  ## workers killed, stopped and broken while they train, a thousand odd commands; ten minutes
	$(BIN)/python -m pytest -n 3 --dist loadfile -m faults tests

test-crashes: setup  ## every way to break a run in every phase, as root; hours; ONLY=ray/ppo, KILLS=100, NODE_KILLS=20
ifdef NODE_KILLS
	$(BIN)/python tests/faults/node_kills.py --kills $(NODE_KILLS)
else
	$(BIN)/python tests/faults/crash_matrix.py $(if $(ONLY),--only "$(ONLY)") $(if $(KILLS),--kills $(KILLS))
endif
	$(BIN)/python docs/generate.py

test-cancels: setup  ## jobs on SLURM and OAR ended in every way, as root; 40 minutes; ON=slurm, ONLY="link cut"
	$(BIN)/python tests/cluster/cancel_trials.py $(if $(ON),--on $(ON)) $(if $(ONLY),--only "$(ONLY)")
	$(BIN)/python docs/generate.py

soak: setup  ## what grows in a long run; two hours; MINUTES=10
	$(BIN)/python tests/faults/soak.py $(if $(MINUTES),--minutes $(MINUTES))
	$(BIN)/python docs/generate.py

test-cluster: setup  ## SLURM, OAR, MPI and ssh on hosts made on this machine, as root; 17 minutes
	@[ "$$(id -u)" = 0 ] || { echo "make test-cluster makes hosts out of namespaces: run it as root"; exit 1; }
	@command -v ip >/dev/null || { echo "make test-cluster needs ip: apt-get install iproute2"; exit 1; }
	$(BIN)/python -m pytest -n 3 --dist loadfile -m cluster tests/cluster

bench-setup:  ## make the peers' environment
	sh benchmarks/peers.sh

BENCH = $(BIN)/python benchmarks/bench.py $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again) $(if $(QUICK),--quick) \
	$(if $(REPEATS),--repeats $(REPEATS))

bench: setup bench-setup  ## every figure of docs/benchmarks.md, on a quiet machine; 118 minutes on 2 cores; ONLY=dqn, AGAIN=1
	$(BENCH)

bench-gpu: setup  ## the figures that need a GPU; 52 minutes
	$(BENCH) --gpu

clean:  ## remove caches; runs and environments stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

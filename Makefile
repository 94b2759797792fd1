# `make` targets share one environment, .venv, which is renewed when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST := $(BIN)/python -m pytest
TWO := -n 2 --dist worksteal

.DEFAULT_GOAL := help
GRID := runs/table1-proxy
PATHS := runs/paths-demo
.PHONY: help setup demo table1-proxy paths test test-slow test-gpu gpu check docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## train a small model for a few minutes on this CPU, evaluate it, draw where it reads
	$(BIN)/python train.py experiment=demo
	$(BIN)/python eval.py run=runs/demo-s_lr-N4-r16 diagnostics=true

table1-proxy: $(READY) ## train all rows of the paper's Table 1 at a size for a CPU, and report; continues where it was stopped
	$(BIN)/python scripts/table1.py experiment=proxy runs=$(GRID) $(SETTINGS)
	$(BIN)/python scripts/report.py $(GRID)/*/ out=$(GRID)-report

paths: $(READY) ## train every residual path at demo size, and report them by loss, compute and time; continues where it was stopped
	$(BIN)/python train.py -m experiment=demo 'path=glob(*)' runs=$(PATHS) $(SETTINGS)
	$(BIN)/python scripts/report.py $(PATHS)/*/ out=$(PATHS)-report

test: $(READY) ## the tests, two at a time, in some minutes
	$(TEST) $(TWO)

test-slow: $(READY) ## the tests that take longer: every variant compiled, every variant resumed
	$(TEST) $(TWO) -m "slow and not gpu"

test-gpu: $(READY) ## the tests that need a CUDA device
	$(TEST) -m gpu

gpu: ## what only a GPU can tell: kernels, steps, train.py, profile; ends itself after nine minutes; needs torch and Triton
	$(PYTHON) bench/gpu.py --json gpu.json

check: $(READY) ## linter, formatter and type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) ## write docs/config.md anew from the schema
	$(BIN)/python scripts/config_reference.py docs/config.md

setup: $(READY) ## only make the environment

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; write make PYTHON=python3.11 (or newer)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "no venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(READY)

clean: ## remove the environment and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

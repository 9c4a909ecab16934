# Every verb of the project. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
DEMO_DIR ?= runs/quickstart

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-vm lint bench clean

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

setup: ## install what is missing (Debian packages, .venv with pinned versions)
	@PYTHON=$(PYTHON) scripts/setup.sh

demo: setup ## the main job: three trainings over an emulated WAN, one report (about 6 minutes)
	@$(SUDO) .venv/bin/dilocox doctor >/dev/null || { $(SUDO) .venv/bin/dilocox doctor; exit 1; }
	$(SUDO) .venv/bin/dilocox sweep experiments/sweeps/quickstart.yaml --resume --retry -o $(DEMO_DIR); \
	status=$$?; [ -f $(DEMO_DIR)/summary.parquet ] && .venv/bin/dilocox report $(DEMO_DIR); exit $$status

test: setup lint ## lint, types and tests, netem in a virtual machine among them (without root or Debian those are skipped with a reason)
	.venv/bin/python -m pytest -m "not long"

test-all: setup lint ## everything, the long tests too
	.venv/bin/python -m pytest

test-vm: setup ## netem under Debian's stock kernel, in a virtual machine (needs root and Debian; 2 minutes, 4 on a busy machine)
	$(SUDO) .venv/bin/python tests/vm/machine.py
	$(SUDO) .venv/bin/python -m pytest -p no:cacheprovider tests/vm

lint: setup ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: setup ## measure links, delay line, start-up and exchange; prints medians beside named rivals
	$(SUDO) .venv/bin/python tests/bench $(BENCH)

clean: ## remove what dead runs left on this machine, and build caches (never results)
	@if [ -x .venv/bin/dilocox ]; then $(SUDO) .venv/bin/dilocox clean; fi
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

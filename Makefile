# `make demo` and `make test` are the two commands to begin with. Every target builds the virtual
# environment when it is missing or when pyproject.toml has changed since.
#   VENV=/somewhere/else    another environment (one that exists is reused)
#   PYTHON=python3.13       the interpreter that a new environment is made with

VENV   ?= .venv
PYTHON ?= python3

BIN       := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/.ddpkit-installed

.DEFAULT_GOAL := help
.PHONY: help demo test drills lint typecheck check bench clean

help:
	@sed -n 's/^\([a-z]*\): .*## /\1: /p' Makefile

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[dev]'
	touch $@

demo: $(INSTALLED)      ## train a CNN on real handwritten digits with two ranks
	$(BIN)/python examples/digits.py

test: $(INSTALLED)      ## every test but the drills and those that need a GPU
	$(BIN)/python -m pytest -m 'not drill and not gpu'

drills: $(INSTALLED)    ## soaks, kills and other long tests
	$(BIN)/python -m pytest -m 'drill and not gpu' || test $$? -eq 5  # 5: there is no drill yet

lint: $(INSTALLED)      ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(INSTALLED) ## mypy, strict
	$(BIN)/mypy

check: lint typecheck test ## what has to pass before a change goes in

bench: $(INSTALLED)     ## the benchmarks
	$(BIN)/python benchmarks/launch.py

clean:                  ## remove .venv (never another VENV) and what the tools left
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist digits.pt
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

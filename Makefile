# `make demo` and `make test` do everything from a fresh clone: virtual environment, packages, run.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

# Shared libraries that Mooncake's package needs and does not carry.
LIBRARIES := libibverbs1 libnuma1 libcurl4

.PHONY: help install libraries services demo test test-gpu lint format proto bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(READY)  ## the virtual environment with everything that demo and tests need

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "HiCache needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "No venv: apt-get install python3-venv"; exit 1; }
	@echo "Installing packages into $(VENV), once: PyTorch first, then the others ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

libraries:  ## the shared libraries that Mooncake needs, where they are missing and we are root
	@for name in $(patsubst %1,%.so.1,$(patsubst %4,%.so.4,$(LIBRARIES))); do \
	    PATH=$$PATH:/sbin ldconfig -p | grep -q "$$name " && continue; \
	    test "$$(id -u)" = 0 || { echo "Mooncake needs $$name: apt-get install $(LIBRARIES)" >&2; break; }; \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends $(LIBRARIES) || true; break; \
	done

services:  ## the servers that tests of storage use, where they are missing and we are root
	@command -v redis-server >/dev/null || { \
	    if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	        apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends redis-server || true; \
	    fi; }
	@command -v redis-server >/dev/null || \
	    echo "redis-server is missing: its tests will be skipped, or fail with CI=true. apt-get install redis-server" >&2

demo: $(READY)  ## a hybrid model served with L1, L1+L2, L1+L2+L3, and a restart: about three minutes
	$(BIN)/python -m examples.demo

test: $(READY) libraries services  ## all tests, linters and type checks included
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
	$(BIN)/python -m bench.storage

clean:  ## remove what make made
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

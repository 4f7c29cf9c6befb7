# On a machine with python3 (and its venv module) and make: `make demo` or `make test` do everything.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := hf,train,sklearn,dask,cli,report,bench,control,docs,test,lint
# The pins need Python 3.11; on 3.10 the oldest supported versions are installed.
CONSTRAINTS ?= $(shell $(PYTHON) -c 'import sys; print("constraints.txt" if sys.version_info >= (3, 11) else "constraints-min.txt")' 2>/dev/null)
STAMP := $(VENV)/.installed
NEEDED := $(VENV)/.needed

.PHONY: demo test test-all lint bench reproduce docs release clean setup
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)

# What the demonstration needs; the tests, the benchmarks and the site need the rest.
$(NEEDED): pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "bochner needs python3 >= 3.10; '$(PYTHON)' was not found. Install it or call: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "bochner needs Python >= 3.10; '$(PYTHON)' is older. Call: make PYTHON=/path/to/newer/python"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "bochner needs Python's venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[hf,cli,report]'
	@touch $@

$(STAMP): $(NEEDED)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

demo: $(NEEDED) ## linearise a real pretrained model and report how good the result is
	$(BIN)/bochner demo

test: $(STAMP) ## the tests, the docstrings' examples and the documentation's code (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(STAMP) ## the tests and the long statistical runs
	$(BIN)/python -m pytest -n 2 --dist loadfile -m ''

lint: $(STAMP) ## style, format, types, and links and names in the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(STAMP) ## the benchmarks: ratios against peers and the floor, as JSON and tables
	$(BIN)/python benchmarks/run.py

reproduce: $(STAMP) ## the papers' figures and tables, what is missing or stale; QUICK=1: small forms, 15 minutes
	$(BIN)/python experiments/run.py $(if $(QUICK),--quick)
	$(if $(QUICK),,$(BIN)/python experiments/gallery.py)

docs: $(STAMP) ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Builds wheel and source archive, and tries each in an environment of its own, outside the source.
release: $(STAMP) ## build wheel and source archive, install each in a clean environment and try it
	rm -rf dist build/release && mkdir -p build/release
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) 'hatchling>=1.27'
	$(BIN)/python -m hatchling build
	@for kind in whl tar.gz; do \
	  $(PYTHON) -m venv build/release/$$kind && \
	  build/release/$$kind/bin/python -m pip install -q -c $(CONSTRAINTS) "$$(ls dist/*.$$kind)[cli]" && \
	  cp tests/smoke.py build/release/ && \
	  (cd build/release && $$kind/bin/python smoke.py $$(../../$(BIN)/python -c 'import bochner; print(bochner.__version__)')) || exit 1; \
	done

clean: ## remove the virtual environment and build products
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache

# make demo   set up .venv and run the demonstration on the data the package ships
# make test   set up .venv and run every check: lint, types, tests, doctests, examples
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-dev
# One thread a worker: the tests are many small matrices, and the workers share the cores.
TEST_WORKERS ?= auto

.PHONY: demo test lint types tests format wheel clean

demo: $(STAMP)
	$(BIN)/gramscope demo

test: lint types tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --cov --cov-report=term:skip-covered

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(STAMP)
	$(BIN)/python -m build

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gramscope needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

# make demo   set up .venv and run the demonstration on the data the package ships
# make test   set up .venv and run every check: lint, types, tests, doctests, examples, and the documentation site
# make docs   build the documentation into site/, running its tutorials; warnings are errors
# make wheel-demo   build the wheel, install it into an empty environment and run its demonstration there
# make lowest set up .venv-lowest with every dependency at its lowest allowed version and run the tests that use them
# make reliability   run the tests of faults, fuzzing, side effects and extreme matrices, and write docs/reliability.md
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-dev
# One thread a worker: the tests are many small matrices, and the workers share the cores.
TEST_WORKERS ?= auto
LOWEST_TESTS ?= tests/lab/cli tests/lab/runs tests/lab/data tests/lab/report tests/integrations tests/lab/training

.PHONY: demo test lint types tests docs format wheel wheel-demo lowest reliability clean

demo: $(STAMP)
	$(BIN)/gramscope demo

test: lint types docs tests

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

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict --config-file website/mkdocs.yml

wheel: $(STAMP)
	$(BIN)/python -m build

# The wheel alone, in an empty environment, away from the checkout: what a user gets from the package index.
wheel-demo: wheel
	rm -rf build/empty && $(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls -t $(CURDIR)/dist/*.whl | head -1)[report]"
	cd build/empty && bin/gramscope demo --out demo

# Dependencies of dependencies are new and warn that old callers are outdated, so warnings are no errors here.
lowest:
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	$(PYTHON) studies/lowest_versions.py > .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints.txt --constraint .venv-lowest/lowest.txt \
	    --editable '.[report,pandas,parquet,sklearn,torchmetrics,notebook,tensorboard,test]'
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q -n $(TEST_WORKERS) -o filterwarnings=default $(LOWEST_TESTS)

reliability: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python studies/reliability.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gramscope needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-lowest build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

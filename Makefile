# make demo   set up .venv with what the command needs and run the demonstration on the data the package ships
# make test   set up .venv with everything and run every check: lint, types, tests, doctests, examples, and the documentation site
# make coverage   run the tests and list the lines that none of them runs
# make docs   build the documentation into site/, running its tutorials; warnings are errors
# make wheel-demo   build the wheel, install it into an empty environment and run its demonstration there
# make lowest set up .venv-lowest with every dependency at its lowest allowed version and run the tests that use them
# make reliability   run the tests of faults, fuzzing, side effects and extreme matrices, and write docs/reliability.md
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two stamps, for the two sets of packages that can be in .venv.
LAB := $(VENV)/.installed-lab
DEV := $(VENV)/.installed-dev
# One thread a worker: the tests are many small matrices, and the workers share the cores.
TEST_WORKERS ?= auto
LOWEST_TESTS ?= tests/lab/cli tests/lab/runs tests/lab/data tests/lab/report tests/integrations tests/lab/training

.PHONY: demo test lint types tests coverage docs format wheel wheel-demo lowest reliability clean

demo: $(LAB)
	$(BIN)/gramscope demo

test: lint types docs tests

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

tests: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS)

coverage: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --cov --cov-report=term:skip-covered

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict --config-file website/mkdocs.yml

wheel: $(DEV)
	$(BIN)/python -m build

# The wheel alone, in an empty environment, away from the checkout: what a user gets from the package index.
wheel-demo: wheel
	rm -rf build/empty && $(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls -t $(CURDIR)/dist/*.whl | head -1)[lab]"
	cd build/empty && bin/gramscope demo --out demo

# Dependencies of dependencies are new and warn that old callers are outdated, so warnings are no errors here.
lowest:
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	$(PYTHON) studies/lowest_versions.py > .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints.txt --constraint .venv-lowest/lowest.txt \
	    --editable '.[lab,pandas,parquet,sklearn,torchmetrics,notebook,tensorboard,test]'
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q -n $(TEST_WORKERS) -o filterwarnings=default $(LOWEST_TESTS)

reliability: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python studies/reliability.py

$(LAB): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gramscope needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab]'
	touch $(LAB)

$(DEV): $(LAB)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(DEV)

clean:
	rm -rf $(VENV) .venv-lowest build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

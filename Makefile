# Each target sets up what it needs: a fresh machine with Python 3.11, pip, make and git is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Two workers with one thread each: threads that wait for each other on two cores take several times as long.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo docs examples test test-all lint clean

# A private model on real handwritten digits, in minutes and without a download.
demo: $(VENV)/.ready-demo
	$(BIN)/dp-microadam train

# The documentation as a site in site/, strictly: what leads nowhere fails. Needs no network once it is installed.
docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every example, one after the other; each takes less than two minutes of one core.
examples: $(VENV)/.ready-examples
	set -e; for example in examples/*.py examples/tasks/*.py; do echo "$$example"; $(BIN)/python "$$example"; done

test: $(VENV)/.ready-test lint
	$(PYTEST)

test-all: $(VENV)/.ready-test lint
	DP_MICROADAM_THOROUGH=1 $(PYTEST) -m ''

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A stamp per set of extras: re-installed when what is declared changes, instant otherwise. torch goes first and alone, so
# that no other package's range can choose a different build of it.
$(VENV)/.ready-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis

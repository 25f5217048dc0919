PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test test-conformance test-export lint format bench bench-fusion clean

setup: $(VENV)/.dev

# Stamps: done once, and again when the project file or the pins change.
$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(INSTALL) -e '.[dev,export]'
	touch $@

demo: setup
	$(BIN)/toolkit demo

test: setup
	$(BIN)/python -m pytest -q -n 2 -m 'not conformance and not export'

test-conformance: setup
	$(BIN)/python -m pytest -q -n 2 -m conformance

# Exports from PyTorch, in the environment of the benchmarks.
test-export: $(VENV)/.bench
	$(BIN)/python -m pytest -q -n 2 -m export

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright -p pyproject.toml

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/engine.py

bench-fusion: $(VENV)/.bench
	$(BIN)/python benchmarks/fusion.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

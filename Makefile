# Everything here needs Python 3.10 or newer, git and make; no GPU. The rest is installed into
# .venv, once. Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= demo-out

# With two threads, each waits for the other at every operator: on cores that something else uses
# too, small models then take many times as long.
export OMP_NUM_THREADS ?= 1

# Tests start Python by the hundred: without bytecode on disk, each of them would compile the
# package anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
RUN := $(VENV)/.can-run
DEV := $(VENV)/.can-test

# Of 17,000 modules most are never imported: Python compiles those that are, once.
PIP := $(BIN)/python -m pip install --quiet --no-compile
INSTALL := $(PIP) --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test quick test-all check fix docs browser hta trackers gpu release-check house extras venv clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN) ## Find the doubled checkpointing in an example, predict what the fix saves, measure it
	@mkdir -p $(OUT)/doubled
	$(BIN)/recompute-scan run --steps 5 --verify -o $(OUT)/doubled examples/doubled_llama_fsdp.py
	@echo
	@$(BIN)/python examples/read_results.py $(OUT)/doubled/result.json

PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: check quick ## check, then all quick tests and a sample of the slow ones

quick: $(DEV)
	$(PYTEST) -m "not slow or sample"

test-all: export RECOMPUTE_SCAN_THOROUGH := 1
test-all: check ## check, then every test: training processes by the hundred, most of an hour
	$(PYTEST)

browser: $(VENV)/.has-browser ## The report in a real Chromium (Debian's package, or CHROMIUM=PATH)
	$(BIN)/python -m pytest --numprocesses 2 tests/browser

# Beside the environment, and without the JupyterLab that it asks for and the bridge does not use.
HTA := build/hta

hta: $(DEV) ## The bridge to Holistic Trace Analysis
	$(PIP) --no-deps --upgrade --target $(HTA) traceinsight==0.6.1
	PYTHONPATH=$(HTA) $(BIN)/python -m pytest tests/hta

# Beside the environment, whose packages it sees and does not change.
TRACKERS := build/trackers

trackers: $(DEV) ## What W&B, MLflow, TensorBoard and trackio are told, each offline and read back
	$(BIN)/python -m venv --clear $(TRACKERS)
	$(TRACKERS)/bin/python -c "import pathlib, sys, sysconfig; pathlib.Path(sysconfig.get_path('purelib'), 'beside.pth').write_text(sys.argv[1])" "$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"
	$(TRACKERS)/bin/python -m pip install --quiet wandb==0.31.0 mlflow-skinny==3.17.2 tensorboard==2.21.0 trackio==0.43.0
	PYTHONPATH=src $(TRACKERS)/bin/python -m pytest tests/trackers

GPU := build/gpu

gpu: $(DEV) ## On a machine with a GPU: every kind of answer beside its truth, kept in build/gpu
	$(BIN)/python -m benchmarks gpu --keep $(GPU)

docs: $(VENV)/.has-docs ## The documentation as a site in build/docs; a warning is an error
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs build/docs

check: $(DEV) ## Formatting, lint, types and import rules; changes nothing
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(DEV) ## Format, repair what lint can repair, write the generated pages
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/python docs/generate.py

house: $(DEV) ## How the source is built: sizes, names and imports, against the budget
	$(BIN)/python -m tests.house

release-check: $(VENV)/.has-release ## Build sdist and wheel, look into them, install and run the README
	$(BIN)/python -m tests.release_check

venv: $(DEV) ## The virtual environment, with the tools for tests; then `.venv/bin/python -m benchmarks`

clean: ## Remove the virtual environment, caches and the demo's output
	rm -rf $(VENV) $(OUT) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# torch goes first, so that its pin is met before another package can ask for a torch of its own.
$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed: make PYTHON=python3.12 …"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) torch
	$(INSTALL) --editable '.[torch,examples]'
	touch $@

$(DEV): $(RUN)
	$(INSTALL) --group test --group check
	touch $@

extras: $(foreach group,browser docs release,$(VENV)/.has-$(group))

$(VENV)/.has-%: $(DEV)
	$(INSTALL) --group $*
	touch $@

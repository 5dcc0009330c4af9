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

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test tests test-all browser shots hta docs check fix venv clean accuracy diagnoses prediction overhead gpu-matrix versions launchers faults scripts damage fidelity compiled lint-cases real-scripts fuzz house bench-load bench-page share-check licenses release-check live-failures policies plan guard trackers agent-eval

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN) ## Find the doubled checkpointing in an example, predict what the fix saves, measure it
	@mkdir -p $(OUT)/doubled
	$(BIN)/recompute-scan run --steps 5 --verify -o $(OUT)/doubled examples/doubled_llama_fsdp.py
	@echo
	@$(BIN)/python examples/read_results.py $(OUT)/doubled/result.json

PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: check tests ## check, then all quick tests and a sample of the slow ones

tests: $(DEV) ## The same tests, without check
	$(PYTEST) -m "not slow or sample"

test-all: export RECOMPUTE_SCAN_THOROUGH := 1
test-all: check ## check, then every test: training processes by the hundred, most of an hour
	$(PYTEST)

browser: $(DEV) ## The report in a real Chromium (Debian's package, or CHROMIUM=PATH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group browser
	$(BIN)/python -m pytest tests/browser

shots: $(DEV) ## Pictures of the report for the documentation, into docs/img
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group browser
	$(BIN)/python docs/shots.py

# Beside the environment, and without the JupyterLab that it asks for and the bridge does not use.
HTA := build/hta

hta: $(DEV) ## The bridge to Holistic Trace Analysis
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(HTA) traceinsight==0.6.1
	PYTHONPATH=$(HTA) $(BIN)/python -m pytest tests/hta

# Beside the environment, whose packages it sees and does not change.
TRACKERS := build/trackers

trackers: $(DEV) ## What W&B, MLflow, TensorBoard and trackio are told, each offline and read back
	$(BIN)/python -m venv --clear $(TRACKERS)
	$(TRACKERS)/bin/python -c "import pathlib, sys, sysconfig; pathlib.Path(sysconfig.get_path('purelib'), 'beside.pth').write_text(sys.argv[1])" "$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"
	$(TRACKERS)/bin/python -m pip install --quiet wandb==0.31.0 mlflow-skinny==3.17.2 tensorboard==2.21.0 trackio==0.43.0
	PYTHONPATH=src $(TRACKERS)/bin/python -m pytest tests/trackers

docs: $(DEV) ## The documentation as a site in build/docs; a warning is an error
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
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

# All that needs neither processes nor a compiler.
ON_RIG = core huggingface architectures bystanders schedules places equal kinds functions others
accuracy: $(DEV) ## Truth beside answer for every recorded case, on this machine
	$(BIN)/python benchmarks/accuracy.py $(BENCH)
	$(BIN)/python benchmarks/accuracy.py --device rig --times ns --group $(ON_RIG)
	$(BIN)/python benchmarks/shapes.py --cost

diagnoses: $(DEV) ## Every failure that can be made to happen: the code expected and found
	$(BIN)/python benchmarks/diagnoses.py

live-failures: $(DEV) ## The reported failures, in several forms and with the versions they came with
	$(BIN)/python benchmarks/live_failures.py $(BENCH)

gpu-matrix: $(DEV) ## The nesting table on this machine's GPU; traces and truths to traces/gpu
	$(BIN)/python benchmarks/gpu_matrix.py --keep traces/gpu

versions: $(DEV) ## Every torch from 2.1 on, each in an environment made for it: a table
	$(BIN)/python benchmarks/versions.py $(BENCH)

launchers: $(DEV) ## A small job under every launcher: the verdict beside the job's own count
	$(BIN)/python benchmarks/launchers.py $(BENCH)

lint-cases: $(DEV) ## What lint says of scripts and configurations whose truth is known
	$(BIN)/python benchmarks/lint_cases.py

real-scripts: $(DEV) ## Scripts that people train with, SOURCES=clones of them: verdict, count, losses, fix
	$(BIN)/python benchmarks/real_scripts.py $(SOURCES) $(BENCH)

fidelity: $(DEV) ## Gradients with and without checkpoints, beside what comparing a step says
	$(BIN)/python benchmarks/fidelity.py
	$(BIN)/python benchmarks/fidelity.py --accuracy

guard: $(DEV) ## What the guard costs, injected regressions found, and no alarm in healthy trainings
	$(BIN)/python benchmarks/guard.py $(BENCH)

agent-eval: $(DEV) ## A client that follows docs/agents/SKILL.md, scored against known truths
	$(BIN)/python benchmarks/agent_eval.py $(BENCH)

compiled: $(DEV) ## Compiled trainings: what ran again, counted as it ran, beside what is said
	$(BIN)/python benchmarks/compiled.py

damage: $(DEV) ## Labelled traces damaged in sixty ways: how often high confidence is wrong
	$(BIN)/python benchmarks/damage.py $(BENCH)

house: $(DEV) ## How the source is built: sizes, names, circles, and facts worked out twice
	$(BIN)/python benchmarks/house.py $(BENCH)

fuzz: $(DEV) ## Odd inputs for everything that reads what others wrote: inputs a second, the slowest
	$(BIN)/python -m tests.fuzz $(BENCH)

faults: $(DEV) ## A small job broken in every way: what was reported, and what was kept
	$(BIN)/python benchmarks/faults.py $(BENCH)

scripts: $(DEV) ## Scripts with ranges, profilers and processes of their own, 20 times each
	$(BIN)/python -m tests.record.test_scripts 20

prediction: $(DEV) ## Predicted and measured step time for a matrix of changes, on this machine
	$(BIN)/python benchmarks/prediction.py $(BENCH)

policies: $(DEV) ## What policies of selective checkpoints decide, as run sees it and as counted
	$(BIN)/python benchmarks/policies.py $(BENCH)

plan: $(DEV) ## Plans for scripts of all kinds, against what the planned arrangements take
	$(BIN)/python benchmarks/plan.py $(BENCH)

overhead: $(DEV) ## What recording costs the steps that are not recorded, and the compared one
	$(BIN)/python benchmarks/overhead.py $(BENCH)

bench-load: $(DEV) ## Reading speed and memory, beside other readers
	$(BIN)/python benchmarks/load.py $(BENCH)

bench-page: $(DEV) ## Size of the report and its first paint in Chromium
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group browser
	$(BIN)/python benchmarks/page.py

share-check: $(DEV) ## Bundle every trace: the same answer, sizes, and no canary
	$(BIN)/python benchmarks/share.py

release-check: $(DEV) ## Build sdist and wheel, look into them, install and run the README
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group release
	$(BIN)/python -m tests.release_check

licenses: $(DEV) ## Every package that an installation brings, with its version and licence
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group release
	@$(BIN)/python -m tests.release_check --licenses

venv: $(DEV) ## Make the virtual environment, with the tools for tests

clean: ## Remove the virtual environment, caches and the demo's output
	rm -rf $(VENV) $(OUT) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# torch goes first, so that its pin is met before another package can ask for a torch of its own.
$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed: make PYTHON=python3.12 …"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,examples]'
	touch $@

$(DEV): $(RUN)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group test --group check
	touch $@

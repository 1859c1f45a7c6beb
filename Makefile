# make demo       run a small experiment with the shipped agent and simulator; resumes if stopped
# make test       run the tests; targets that need .venv build it if it is missing or out of date
# make test-slow  run the tests that make test omits: several processes, killed runs, learning, most
#                 of what the pages show, and jobs on a real Slurm cluster, which they start (as root,
#                 with slurm-wlm and munge)
# make test-mutations  check that tests fail for the deliberate bugs of tests/mutations.yml
# make test-short run a one-minute selection of tests, to check an installation
# make lint       check style, likely mistakes and types
# make benchmark  measure the speeds of docs/scale.md
# make web        build the pages after changes in web/; needs Node 20.19 or later
# make clean      delete .venv and the demo's output

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := demo_output

# Without Python's cached bytecode, every process would compile the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-short test-mutations lint benchmark web clean

$(VENV)/installed: requirements.txt setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 12) else "This project needs Python 3.11 or 3.12 (Procgen has no build for %d.%d); try for example: make PYTHON=python3.11 $(MAKECMDGOALS)" % v)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: $(VENV)/installed
	$(BIN)/python run_pipeline.py --preset demo --output_dir $(DEMO) --parallel 2

# pytest starts one process more than there are cores, because some tests wait for other processes.
# Each process has one thread, because most tests are too small for more. Each file runs in a single
# process, and tests/conftest.py puts the longest files first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(shell expr $$(nproc) + 1) --dist loadfile --no-loadscope-reorder \
	--durations=10
test: $(VENV)/installed
	$(PYTEST) -m "not slow" tests

test-slow: $(VENV)/installed
	$(PYTEST) -m slow tests

test-short: $(VENV)/installed
	$(PYTEST) tests/test_dataset.py tests/test_policy.py tests/test_projector.py \
		tests/test_simulator.py tests/test_scripts.py::test_every_script_explains_all_of_its_flags

test-mutations: $(VENV)/installed
	$(BIN)/python -m tools.mutations

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/mypy

benchmark: $(VENV)/installed
	$(BIN)/python -m benchmarks.agent
	$(BIN)/python -m benchmarks.simulator
	$(BIN)/python -m benchmarks.mazes
	$(BIN)/python -m benchmarks.ranks

web:
	cd web && npm ci --no-audit --no-fund && npm run build

clean:
	rm -rf $(VENV) $(DEMO)

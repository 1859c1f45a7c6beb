# make demo    the experiment in small, on what the repository ships; goes on where it was stopped
# make test    the tests; both build .venv when it is missing or out of date
# make lint    style and likely mistakes
# make web     the interpretability panel's page, after changes in web/; needs Node 20.19 or later,
#              which nothing else does

PYTHON ?= python3
BIN := .venv/bin
DEMO := demo_output

.PHONY: demo test lint benchmark web clean

.venv/installed: requirements.txt setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else "This project needs Python 3.10, 3.11 or 3.12 (Procgen has no build for %d.%d); try for example: make PYTHON=python3.11 $(MAKECMDGOALS)" % v)'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: .venv/installed
	$(BIN)/python run_pipeline.py --preset demo --output_dir $(DEMO)

# One process a core, each with one thread: most tests are too small for more.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile tests

lint: .venv/installed
	$(BIN)/ruff check .

benchmark: .venv/installed
	$(BIN)/python -m benchmarks.agent
	$(BIN)/python -m benchmarks.simulator
	$(BIN)/python -m benchmarks.saliency
	$(BIN)/python -m benchmarks.hidden_state_analysis

web:
	cd web && npm ci --no-audit --no-fund && npm run build

clean:
	rm -rf .venv $(DEMO)

# Every target sets up .venv by itself, and again only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# Where the digits are learnt on more cores than the machine has, one thread a rank is fastest.
export OMP_NUM_THREADS ?= 1
# Output is for pipes and logs as well: no colours, no progress bars of pip.
export PIP_PROGRESS_BAR ?= off
export PYTHONUNBUFFERED := 1

.PHONY: help demo test lint chaos bench clean

help:
	@echo 'make demo    train on real data, kill one rank, freeze another, compare with an unbroken run'
	@echo 'make test    ruff, mypy, import-linter and the tests (not the slow and chaos ones)'
	@echo 'make chaos   the long forms: many random faults'
	@echo 'make bench   recovery time, step overhead, memory, a fleet of 10,000 nodes'
	@echo 'make clean   remove what the targets made'

$(VENV)/.run: pyproject.toml constraints.txt
	@echo 'setting up $(VENV) (once)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.run
	@$(BIN)/python examples/demo.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	$(BIN)/python -m pytest -m 'not slow and not chaos'

chaos: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'slow or chaos' --timeout 1800

bench: $(VENV)/.run
	$(BIN)/python bench/recovery_time.py
	$(BIN)/python bench/step_overhead.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/core_scale.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

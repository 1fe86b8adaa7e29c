# make train   set up .venv if needed, train on what this machine has, end with the run folder and its report
# make test    the same set-up, then the linters and the whole test suite
# make test-all  the same with the full products of test parameters
# make readme  write the results into README.md and docs/ from benchmarks/results/
# Pass flags with ARGS, for example: make train ARGS="--data-dir ~/mnist --epochs 2"

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: train test test-all lint bench readme clean

train: $(READY)
	$(VENV)/bin/onelaunch train $(ARGS)

test: $(READY) lint
	$(VENV)/bin/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

test-all: ARGS += --all-cases
test-all: test

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)
	$(VENV)/bin/onelaunch bench $(ARGS)

readme: $(READY)
	$(VENV)/bin/python -m onelaunch.report.readme

# Rebuilt only when what is installed would change; the package itself is installed editable.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV)

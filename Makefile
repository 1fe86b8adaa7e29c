# make train     install what training needs into .venv, train on what this machine has, write a run folder and its report
# make test      install the test tools too, run the linters and the test suite
# make test-all  the same, with full products of test parameters instead of pairs
# make bench     run the benchmarks
# make dist      build the wheel and the source distribution into dist/
# make docs      write the documentation site to build/docs/; a warning is an error
# make readme    write the results in benchmarks/results/ into README.md and docs/
# Pass flags with ARGS, for example: make train ARGS="--data-dir ~/mnist --epochs 2"

SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
TRAIN_READY := $(VENV)/.train-ready
TEST_READY := $(VENV)/.test-ready
DOCS_READY := $(VENV)/.docs-ready

.PHONY: train test test-all lint bench dist docs readme clean

train: $(TRAIN_READY)
	$(BIN)/onelaunch train $(ARGS)

test: lint
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

test-all: ARGS += --all-cases
test-all: test

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(TRAIN_READY)
	$(BIN)/onelaunch bench $(ARGS)

dist: $(TEST_READY)
	$(BIN)/python -m build --no-isolation --outdir dist .

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "wrote build/docs/index.html"

readme: $(TRAIN_READY)
	$(BIN)/python -m onelaunch.report.readme

# Of pip's output, the downloads of 10 MB and more and the number of packages; errors go to stderr and are always shown.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable
BRIEFLY = | awk '/Downloading .*\(([0-9]+[0-9]\.[0-9]+ MB|.* GB)\)/ { print "download", $$2, $$3, $$4; fflush() } \
	/^Installing collected packages/ { print "install ", split($$0, names, ","), "packages"; fflush() }'

# Repeated only when what is installed would change; the package itself is installed editable.
$(TRAIN_READY): pyproject.toml constraints.txt
	@echo "set up   $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "install  what training needs; this takes minutes the first time"
	@gpu=$$(nvidia-smi -L > /dev/null 2>&1 && echo "[gpu]"); $(INSTALL) ".$$gpu" $(BRIEFLY)
	@touch $@

$(TEST_READY): $(TRAIN_READY)
	@echo "install  what the tests need"
	@$(INSTALL) ".[dev]" $(BRIEFLY)
	@touch $@

$(DOCS_READY): $(TRAIN_READY)
	@echo "install  what the documentation needs"
	@$(INSTALL) ".[docs]" $(BRIEFLY)
	@touch $@

clean:
	rm -rf $(VENV)

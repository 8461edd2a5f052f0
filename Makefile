# Every target makes what it needs and does nothing twice. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
TORCH ?=
WORKERS ?= 2
TESTS ?= quick
.PHONY: help setup demo test test-all test-torch check lint bench gpu-check reference site

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## make .venv with everything that development needs

$(READY): pyproject.toml constraints.txt tests/torchtitan.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than 3.11"; echo "hint: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . --group dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/torchtitan -r tests/torchtitan.txt
	@touch $@

demo: $(READY) ## train on real text with two strands, compare with plain PyTorch, draw the picture
	$(BIN)/python scripts/demo.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

check: lint ## before each commit: lint, types, layers, fast tests
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/pure tests/oracle tests/cli/test_gpu_check.py

test: lint ## everything that continuous integration runs: WORKERS (2) files at a time, then those that count seconds
	$(call tests,and not wide)

test-all: lint ## the wide rows of the tables too: before a release, and after changes that tests/README.md names
	$(call tests,)

define tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not alone $(1)'; first=$$?; \
	$(BIN)/python -m pytest -m 'alone $(1)' && exit $$first
endef

test-torch: ## quick tests on another torch, as TORCH=2.15.0; TESTS=all or files for others
	@$(PYTHON) scripts/test_torch.py '$(TORCH)' $(TESTS)

bench: $(READY) ## the measured claims of README and docs/results.md, written to bench/results/
	$(BIN)/python scripts/bench.py

gpu-check: ## on a CUDA machine, with python3, torch and numpy: GPU tests and benches; elsewhere says so
	$(PYTHON) scripts/gpu_check.py

reference: $(READY) ## write docs/reference again
	$(BIN)/python scripts/write_reference.py

site: $(READY) ## build the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

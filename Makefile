# Every target makes its own virtual environment (.venv) and installs what it needs; a second run
# is fast. PYTHON chooses the interpreter (3.10 or later), PYTEST_ARGS is passed on to pytest.
PYTHON ?= python3
PYTEST_ARGS ?=
BIN := .venv/bin
CXX_FILES := $(shell find plugins scripts tests -name '*.[ch]pp' -o -name '*.h')
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install test test-full container lint format demo clean
help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "edgepool: import and export need Python 3.10 or later: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv

.venv/export.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[export]'
	@touch $@

.venv/test.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[export,rtx,test]'
	@touch $@

install: .venv/test.stamp ## Install everything that the tests use, and fetch the test model
	@$(BIN)/python -m tests.assets

test: install ## Run the tests
	$(BIN)/python -m pytest -n 2 -m "not slow" -q $(PYTEST_ARGS)

test-full: install ## Run all tests, the slow ones too, and record the run in docs/verification.md
	$(BIN)/python -m tests.full $(PYTEST_ARGS)

container: .venv/test.stamp ## Build the images on a Debian, run them (as root: buildah, debootstrap)
	@command -v buildah >/dev/null && command -v debootstrap >/dev/null || { echo "error: apt-get install buildah debootstrap qemu-user-static" >&2; exit 3; }
	$(BIN)/python -m pytest -q -rs --durations 0 --timeout 1800 tests/container $(PYTEST_ARGS)

lint: .venv/test.stamp ## Check style, types, and Python 3.8 on the board side
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_board_side.py

format: .venv/test.stamp ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

demo: .venv/export.stamp ## Take a real model from GGUF to text on ONNX Runtime, in demo/
	@mkdir -p demo
	$(BIN)/python -m tests.assets demo/SmolLM2-135M-Instruct.gguf
	cd demo && ../$(BIN)/edgepool import SmolLM2-135M-Instruct.gguf -o model.pt
	cd demo && ../$(BIN)/edgepool export model.pt
	cd demo && ../$(BIN)/edgepool run --chat --prompt "What is the capital of France?"

clean: ## Remove what these targets made
	rm -rf .venv demo build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

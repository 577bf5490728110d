# make demo    from nothing: environment, training, evaluation, server, scored answers
# make test    environment and all tests but the longest
#
# With another interpreter: make test PYTHON=python3.12. With plain pip instead of uv: make test INSTALLER=pip.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-long lint format docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: ## make or refresh the environment in .venv; returns at once when nothing changed
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup.sh

demo: setup ## train on the demo pairs, evaluate, serve, score a group of answers
	@$(BIN)/python examples/demo.py

test: setup ## environment and all tests but the longest
	$(BIN)/python -m pytest -m "not long"

test-fast: setup ## without the tests marked slow
	$(BIN)/python -m pytest -m "not slow"

test-long: setup ## the tests that take minutes each: thousands of sequences, real models
	$(BIN)/python -m pytest -m long

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## write the generated pages anew: configuration.md, commands.md, openapi.json
	$(BIN)/python scripts/generate_docs.py

clean: ## remove environment, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

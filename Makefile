# Everything the project can do, by name. `make help` lists it.
#
# Needs: stable cargo (rustup), Python 3.11 or 3.12 with venv, gcc, make, git. The rest is brought
# into .venv by scripts/setup_env.py.

SHELL := /bin/sh
.SHELLFLAGS := -eu -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
export PYO3_PYTHON := $(BIN)/python
# No terminal is needed anywhere; a prompt would hang an unattended run.
export GIT_TERMINAL_PROMPT := 0
export PYTHONUNBUFFERED := 1
export CARGO_TERM_COLOR ?= auto
export VIRTUAL_ENV := $(VENV)
export PATH := $(BIN):$(PATH)

# With the test helpers of the core; the bindings are linked by an interpreter, so pytest tests them.
RUST_TESTS := --locked --workspace --exclude lakecache-py --exclude lakecache-bench --all-features
PYTHON_FOLDERS := python tests scripts examples benches
# Whole runs, in seconds; each single test has a limit of its own (nextest.toml, pyproject.toml).
# pytest ends after the test that is late, so that it still names what has failed before.
RUST_LIMIT ?= 1200
PYTEST_LIMIT ?= 1200

.PHONY: help setup models build demo test bench bench-setup lint format check-rust check-python \
        stubtest test-rust test-python clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | \
	    while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

setup: ## Check prerequisites and bring tools and vLLM into .venv (once)
	@python=$$(scripts/prerequisites.sh) && "$$python" scripts/setup_env.py --venv $(VENV) --python "$$python"

models: setup ## Make the model folders of tests and demo in .models
	@$(BIN)/python scripts/make_models.py

build: setup ## Build the extension module (release) into .venv
	@scripts/build_extension.sh

demo: build models ## See a prompt restored after a restart, on any machine
	@$(BIN)/python examples/demo.py
	@$(BIN)/python examples/main_demo.py

test: lint build stubtest test-rust test-python ## Everything that has to pass before a change lands

# LAKECACHE_BENCH_QUICK=1: a few minutes, which shows that all of it runs and measures nothing.
# LAKECACHE_BENCH_DIR: where the files go, on the disk to be measured.
QUICK := $(filter-out 0,$(LAKECACHE_BENCH_QUICK))
BENCH_RECORD := $(CURDIR)/.bench
bench: export LAKECACHE_BENCH_RECORD := $(BENCH_RECORD)
bench: bench-setup build models ## Measure the core, its bindings and cold requests of vLLM
	@rm -rf $(BENCH_RECORD) && mkdir -p $(BENCH_RECORD)
	cargo bench --locked --package lakecache-bench -- --noplot \
	    $(if $(QUICK),--warm-up-time 0.1 --measurement-time 0.2 --sample-size 10)
	$(BIN)/python -m pytest -m bench --timeout=0 --benchmark-columns=min,median,iqr,rounds \
	    --benchmark-json=$(BENCH_RECORD)/python.json \
	    $(if $(QUICK),--benchmark-max-time=0.05 --benchmark-min-rounds=2) benches/python
	@$(if $(QUICK),true,$(BIN)/python benches/_record.py core $(BENCH_RECORD))
	$(BIN)/python benches/bench_cold_overhead.py

bench-setup:
	@python=$$(scripts/prerequisites.sh) && "$$python" scripts/setup_env.py --bench --venv $(VENV) --python "$$python"

lint: setup check-rust check-python ## Formatting, clippy, ruff and mypy

check-rust: setup
	cargo fmt --all --check
	cargo clippy --quiet --locked --workspace --all-targets --all-features -- -D warnings

check-python: setup
	$(BIN)/ruff format --check $(wildcard $(PYTHON_FOLDERS))
	$(BIN)/ruff check $(wildcard $(PYTHON_FOLDERS))
	$(BIN)/mypy

stubtest: build
	@scripts/check_stub.sh

test-rust: setup
	@if cargo nextest --version >/dev/null 2>&1; then \
	    timeout --kill-after=30 $(RUST_LIMIT) cargo nextest run $(RUST_TESTS); \
	    cargo test --quiet --doc $(RUST_TESTS); \
	else \
	    timeout --kill-after=30 $(RUST_LIMIT) cargo test --quiet $(RUST_TESTS); \
	fi

test-python: build
	@$(BIN)/python scripts/make_models.py qwen3-tiny qwen35-tiny qwen35-moe-tiny
	timeout --kill-after=30 $$(($(PYTEST_LIMIT) + 330)) \
	    $(BIN)/python -m pytest --session-timeout=$(PYTEST_LIMIT)

format: setup ## Format all sources
	cargo fmt --all
	$(BIN)/ruff format $(wildcard $(PYTHON_FOLDERS))
	$(BIN)/ruff check --fix $(wildcard $(PYTHON_FOLDERS))

clean: ## Remove what was built (not .venv and .models)
	rm -rf target .bench .pytest_cache .mypy_cache .ruff_cache python/lakecache/*.so

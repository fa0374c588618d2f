# One command each: set-up, demo, JupyterLab, tests, lint, types, benchmarks, kernels. All work in a fresh clone.
.DEFAULT_GOAL := help
.PHONY: help setup demo lab student test lint types bench compat clean
SHELL := /bin/bash

VENV  := .venv
STAMP := $(VENV)/.up-to-date
BIN   := $(CURDIR)/$(VENV)/bin
# Every target runs with the environment's own tools first (mpiexec of the extra `mpi`, ninja for DeepSpeed).
export PATH := $(BIN):$(PATH)

help:                   ## these lines
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)         ## create .venv with everything that development needs

$(STAMP): pyproject.toml constraints.txt .ci/setup
	@.ci/setup $(VENV)
	@touch $(STAMP)

demo: $(STAMP)          ## train a small language model on 2 ranks under seven strategies, and compare them
	@python examples/run_demo.py

lab: $(STAMP)           ## open the quickstart in JupyterLab
	@echo "lab: opening examples/00_quickstart.ipynb (Ctrl-C twice ends it)"
	@jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) examples/00_quickstart.ipynb

student: $(STAMP)       ## make the student versions of the tutorial's notebooks (ARGS=--check: are they up to date?)
	@python examples/make_student.py $(ARGS)

# Two at a time: half of the time of a test is waiting; a file stays in one process, since its tests share ranks.
test: $(STAMP)          ## run the tests
	@echo "test: real ranks are started; about 15 minutes on 2 cores"
	@python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(STAMP)          ## ruff: rules and format
	@ruff check
	@ruff format --check

types: $(STAMP)         ## mypy, strict
	@mypy

bench: $(STAMP)         ## measure against %%px, torchrun and a plain script (ARGS=--quick for a first look)
	@python -m benchmarks.run $(ARGS)

compat: $(STAMP)        ## a small suite under each supported ipykernel
	@.ci/compat $(VENV)

clean:                  ## remove the environments and caches
	rm -rf $(VENV) .venv-compat .mypy_cache .ruff_cache .pytest_cache

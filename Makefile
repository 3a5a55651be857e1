# Each target does its own set-up: on a machine with Python 3.10 or newer, pip and make, start with
# `make demo` or `make test`. The environment is made once in .venv and again only when
# pyproject.toml changes. `make PYTHON=python3.12 …` chooses another interpreter.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

PY := $(VENV)/bin/python

# The tests run many small models: more threads than one only get into each other's way, above all
# where tests start processes of their own.
test: export OMP_NUM_THREADS ?= 1
# They start some hundred times, and need not compile the same modules each time.
test: export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo smollm2 test soak reloads llama-cpp-parity lint format docs proto wheel clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed  ## train a small model, sample it, serve it and call it (ARGS="--max-steps 50" for less)
	@$(PY) -m gpt demo $(ARGS)

smollm2: $(VENV)/.installed  ## fetch a small model that chats (93 MB) and import it to models/smollm2
	@$(PY) -m gpt.weights.smollm2 models/smollm2

# Three at a time, on two cores: most wait for a process of their own for a while.
test: $(VENV)/.installed-dev  ## run all tests (ARGS="-k name" for some)
	@$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

soak: export OMP_NUM_THREADS ?= 1

soak: $(VENV)/.installed-dev  ## serve 10,000 requests to clients that cancel, err and die (ten minutes)
	@$(PY) -m tests.integration.soak $(ARGS)

reloads: export OMP_NUM_THREADS ?= 1

reloads: $(VENV)/.installed-dev  ## replace a served model 1,000 times while requests run (some minutes)
	@$(PY) -m tests.integration.reloads $(ARGS)

# In an environment of its own, which `clean` removes; built from source, it takes some minutes.
llama-cpp-parity: $(VENV)/.installed  ## build llama.cpp and hold generated text to it (SMOLLM2=file.gguf for a real model)
	@test -x $(VENV)-llama-cpp/bin/python || $(PYTHON) -m venv $(VENV)-llama-cpp
	@$(VENV)-llama-cpp/bin/python -m pip install --quiet llama-cpp-python
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.llama_cpp_parity $(SMOLLM2) --llama $(VENV)-llama-cpp/bin/python

lint: $(VENV)/.installed-dev  ## check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.installed-dev  ## put the code into the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed-dev  ## build the documentation into site/; a warning fails it
	$(PY) -m mkdocs build --strict

proto: $(VENV)/.installed-dev  ## generate serve/v1 from protos/
	$(PY) -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. \
	    protos/serve/v1/generation.proto

wheel: $(VENV)/.installed-dev  ## build dist/antiphon-*.whl
	$(PY) -m build --wheel

clean:  ## remove the environment, builds and caches; data/, models/ and runs/ stay
	rm -rf $(VENV) $(VENV).bootstrap $(VENV)-llama-cpp build dist site *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is silent; a dot every two seconds says that it is alive. What it would have said is in the
# log, and is shown if it fails. pip would compile what it installs on one core; files that are no
# Python, as some packages have, are no fault. Arguments: what to install, the stamp's file.
define install
	@printf 'Installing Antiphon and what it needs into %s (a few minutes the first time) ' $(VENV)
	@dots() { while sleep 2; do printf .; done; }; dots & \
	trap "kill $$! 2>/dev/null" EXIT; trap 'exit 130' INT TERM; \
	if $(PY) -m pip install --no-input --disable-pip-version-check --no-compile -e '$(1)' \
	    >$(VENV)/install.log 2>&1; then $(PY) -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1; \
	    echo ' done'; \
	else echo ' failed:'; tail -n 30 $(VENV)/install.log; exit 1; fi
	@touch $(2)
endef

$(VENV)/.installed: pyproject.toml | $(PY)
	$(call install,.,$@)

$(VENV)/.installed-dev: pyproject.toml | $(PY)
	$(call install,.[dev],$@ $(VENV)/.installed)

# Debian's Python comes without ensurepip, and `python -m venv` fails there; virtualenv, put into a
# folder of its own, does the same work without touching the system's packages.
$(PY):
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	    echo 'There is no $(PYTHON). Install Python 3.10 or newer, or name one: make PYTHON=python3.12 …'; \
	    exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "Antiphon needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	        "Name another one: make PYTHON=python3.12 …"; exit 1; } >&2
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	    rm -rf $(VENV) && \
	    $(PYTHON) -m pip install --quiet --target $(VENV).bootstrap virtualenv && \
	    PYTHONPATH=$(VENV).bootstrap $(PYTHON) -m virtualenv --quiet $(VENV) && \
	    rm -rf $(VENV).bootstrap; } || { \
	    rm -rf $(VENV) $(VENV).bootstrap; \
	    echo "Neither 'venv' nor 'virtualenv' works with $(PYTHON)." \
	        "Install one of them, for example with: apt-get install python3-venv"; exit 1; } >&2

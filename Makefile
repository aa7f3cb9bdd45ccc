# `make` or `make help` says what there is. Everything runs inside .venv, which is made on first use
# and reused until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
DEMO_ENV := $(VENV)/.stamp-demo
TEST_ENV := $(VENV)/.stamp-test
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

# What bridge/ may not use, although it is exempt from the table of bans in pyproject.toml.
BRIDGE_BANS := { \
    "optree" = { msg = "Use functional_te.pytree." }, \
    "os.environ" = { msg = "Take configuration as an argument." }, \
    "os.getenv" = { msg = "Take configuration as an argument." } }

section = @printf '\n==> %s\n' "$(1)"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test lint types bench docs site clean _pytest _notebooks

help:
	@echo 'usage: make TARGET [VARIABLE=VALUE ...]'
	@echo
	@echo 'targets:'
	@echo '  demo    run the demo; pass it arguments with ARGS="..."'
	@echo '  test    every check in turn: lint, types, tests, notebooks, the documentation'
	@echo '  lint    ruff check, ruff format --check, import contracts'
	@echo '  types   mypy'
	@echo '  bench   run the benchmarks; pass them arguments with ARGS="..."'
	@echo '  docs    write the pages and drawings in docs/ that are made from the code'
	@echo '  site    build the documentation into build/site, with warnings as errors'
	@echo '  clean   remove .venv, caches and build products'
	@echo
	@echo 'variables:'
	@echo '  PYTHON       the interpreter to make .venv with (3.11 or later; default: python3)'
	@echo '  PIP_ARGS     more arguments for pip install. Where pip would fetch a CUDA build of torch and a'
	@echo '               CPU build is wanted: PIP_ARGS="--extra-index-url URL_OF_AN_INDEX_OF_CPU_WHEELS"'
	@echo '  PYTEST_ARGS  more arguments for the pytest of make test'

demo: $(DEMO_ENV)
	$(BIN)/python -m bridge.demo $(ARGS)

test: lint types _pytest _notebooks site
	$(call section,all checks passed)

# The second ruff call holds bridge/ to the bans that apply there.
lint: $(TEST_ENV)
	$(call section,ruff check)
	$(BIN)/ruff check .
	$(BIN)/ruff check --isolated --target-version py311 --select TID251 \
	    --config 'lint.flake8-tidy-imports.banned-api = $(BRIDGE_BANS)' \
	    bridge
	$(call section,ruff format --check)
	$(BIN)/ruff format --check .
	$(call section,lint-imports)
	$(BIN)/lint-imports

types: $(TEST_ENV)
	$(call section,mypy)
	$(BIN)/mypy

_pytest: $(TEST_ENV)
	$(call section,pytest)
	$(BIN)/python -m pytest -n 2 -m "not slow" $(PYTEST_ARGS)

# The warning filters of the tests do not apply to the notebook machinery.
_notebooks: $(TEST_ENV)
ifneq ($(NOTEBOOKS),)
	$(call section,notebooks)
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=600 -o filterwarnings= $(NOTEBOOKS)
endif

bench: $(TEST_ENV)
	$(BIN)/python -m tests.benchmarks.run $(ARGS)
	$(BIN)/python -m tests.benchmarks.casts
	$(BIN)/python -m tests.benchmarks.casts_nvfp4

docs: $(TEST_ENV)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/figures.py

# The variable silences an advertisement of the theme's.
site: $(TEST_ENV)
	$(call section,documentation)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'build/site/index.html; with its search: $(BIN)/python -m http.server -d build/site'

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache \
	    .import_linter_cache torch_compile_debug
	find functional_te bridge tests notebooks -depth \( -name __pycache__ -o -name .ipynb_checkpoints \) \
	    -exec rm -rf {} + 2>/dev/null || true

# --------------------------------------------------------------------------- environment

# $(PYTHON) if it is new enough, else the first of the usual names that is.
$(VENV)/.stamp-created:
	@set -e; \
	ok='import sys; sys.exit(sys.version_info < (3, 11))'; \
	chosen=; \
	for candidate in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	    if "$$candidate" -c "$$ok" >/dev/null 2>&1; then chosen="$$candidate"; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	    echo 'error: no Python 3.11 or later found (tried $(PYTHON), python3.13, python3.12, python3.11).' >&2; \
	    echo '       Install one, or name it: make PYTHON=/path/to/python3.11 ...' >&2; \
	    exit 1; \
	fi; \
	printf '\n==> creating $(VENV) with %s (%s)\n' "$$chosen" "$$("$$chosen" --version)"; \
	"$$chosen" -m venv --clear $(VENV) || { \
	    echo 'error: could not create $(VENV); on Debian and Ubuntu the python3-venv package is needed.' >&2; \
	    exit 1; \
	}
	@touch $@

$(DEMO_ENV): $(VENV)/.stamp-created pyproject.toml constraints.txt
	$(call section,installing what the demo needs (the first time takes minutes))
	$(INSTALL) -e '.[demo]'
	@touch $@

$(TEST_ENV): $(VENV)/.stamp-created pyproject.toml constraints.txt
	$(call section,installing what the checks need (the first time takes minutes))
	$(INSTALL) -e '.[dev]' nbclient nbmake ipykernel treescope
	@touch $@

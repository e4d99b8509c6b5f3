# Everything runs in .venv, which the first target that needs it makes from the hash locks. `make serve` installs what serving
# needs, any other target its own tools, too.
#
#   make serve               two emulated GPUs on http://127.0.0.1:8000
#   make test                the tests, side by side in JOBS=auto workers (three a core, up to 8; 0: one by one)
#   make test-fast           those that start no server and no other process, and that neither simulate nor draw cases
#   make test-both           those of the broker over Redis too: the others run all but a few over Valkey alone
#   make check               format, lint, types, tests: what has to pass before a change lands
#   make fuzz                damaged inputs for every parser at the door, a million in all; or CASES=…, SEED=…
#   make explore             the property tests with random seeds, for MINUTES=10; or SEED=…
#   make drills              every alert fires and clears under a real Prometheus, in some ten minutes
#   make images              the images of deploy/, built and run in some three minutes: as root, with buildah, after make clients
#   make mutants             whether the tests notice small changes of the core; or ARGS='http --sample 150'
#   make bench               the benchmarks; tables on stdout, JSON in bench/out
#   make triton              Triton's server, which a benchmark measures beside ours
#   make clients             environments of clients that others made, and the base of images, for the tests that use them
#   make examples            packages of the models of examples/iris.py and examples/colours.py
#   make example-embeddings  a real model (all-MiniLM-L6-v2) on http://127.0.0.1:8000; at first some minutes, 400 MB to download
#   make dist                a wheel and a source archive in dist/, checked: content, metadata, an installation of its own
#   make lock                new locks after a change of dependencies; UPGRADE=1 takes newer versions too
#   make protos              the descriptors of the gRPC port, after a change of its .proto files
#   make audit               known vulnerabilities in the locked versions
#   make clean               remove .venv and all that tools left behind
#
#   make PYTHON=python3.13 …  with another Python, from 3.11 on
#   make serve ARGS='--port 9001 --policy window'
#   make example-embeddings TORCH=torch==2.13.0  that build of torch, and not the one that fits the machine

PYTHON ?= python3
ARGS ?=
CASES ?= 1000000
JOBS ?= auto
MINUTES ?= 10
SEED ?=
TORCH ?=

MAKEFLAGS += --no-print-directory
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-deps --require-hashes
# Where many megabytes come, a terminal is shown how many have.
QUIET := $(shell [ -t 2 ] || echo --quiet)
EDITABLE := $(PIP) install --quiet --no-deps --no-build-isolation --editable .
# Bytecode is kept, wherever that is turned off: else each worker, and each server that it starts, compiles all anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(JOBS) --dist worksteal
LOCK := $(BIN)/uv pip compile --no-config --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' --quiet \
	$(if $(UPGRADE),--upgrade)

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-both test-fast check format fuzz explore drills images mutants bench triton clients examples example-embeddings dist lock protos audit clean

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

setup: .venv/.ready

serve: .venv/.ready-serve
	$(BIN)/headway serve examples/emulated_gpu.py:EmulatedGPU --workers 2 --devices cpu --max-batch-size 100 $(ARGS)

test: .venv/.ready
	$(PYTEST) $(ARGS)

test-both: .venv/.ready
	HEADWAY_TEST_BOTH_SERVERS=1 $(PYTEST) tests/contracts tests/redis $(ARGS)

test-fast: .venv/.ready
	$(PYTEST) -m 'not processes and not draws' --ignore tests/e2e --ignore tests/redis --ignore tests/servers --ignore tests/charts \
		--ignore tests/simulator --ignore tests/fuzz $(ARGS)

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) $(ARGS)

format: .venv/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: .venv/.ready
	$(BIN)/python -m tests.fuzz --cases $(CASES) $(if $(SEED),--seed $(SEED))

explore: .venv/.ready
	$(BIN)/python -m tests.explore --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

drills: .venv/.ready
	$(BIN)/python -m tests.e2e.alerts_drill
	$(BIN)/python -m tests.e2e.alerts_alone_drill

images: .venv/.ready
	$(BIN)/pytest tests/deploy/images.py $(ARGS)

mutants: .venv/.ready-mutants
	$(BIN)/python -P tests/mutants.py $(ARGS)

bench: .venv/.ready-bench
	$(BIN)/python bench/run.py $(ARGS)

triton: .venv/triton/.ready

# Each with versions of its own, which need not agree with ours; ARGS names some of them.
clients: .venv/.ready
	@$(BIN)/python -m tests.clients.environments $(ARGS)

dist: .venv/.ready-dist
	$(BIN)/python -P tests/dist.py $(ARGS)

examples: .venv/.ready-examples

example-embeddings: .venv/.ready-embeddings
	HF_HUB_OFFLINE=1 $(BIN)/headway serve examples/embeddings.py:Embedder $(ARGS)

lock: .venv/.ready
	$(LOCK) pyproject.toml --group dev -o requirements-dev.lock
	$(LOCK) pyproject.toml -c requirements-dev.lock --extra redis --group build -o requirements-serve.lock
	$(LOCK) -c requirements-dev.lock --group dist -o requirements-dist.lock
	$(LOCK) pyproject.toml -c requirements-dev.lock --extra redis --extra postgres --extra jwt --extra grpc --extra chat --extra otel --extra policy --extra gpu -o requirements.lock
	$(LOCK) pyproject.toml -c requirements-dev.lock --extra examples -o requirements-examples.lock
	$(LOCK) pyproject.toml -c requirements-dev.lock --extra bench --extra plot -o requirements-bench.lock
	$(LOCK) pyproject.toml -c requirements-dev.lock --group mutants -o requirements-mutants.lock
	$(LOCK) pyproject.toml -c requirements-dev.lock --extra embeddings --group lock --no-emit-package torch \
		--excludes requirements-embeddings.exclude -o requirements-embeddings.lock
	for client in tests/clients/*.in; do \
		$(BIN)/uv pip compile --no-config --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-annotate --custom-compile-command 'make lock' --quiet $(if $(UPGRADE),--upgrade) \
		"$$client" -o "$${client%.in}.txt" || exit 1; done
	for client in tests/clients/*/package.json; do \
		(cd "$${client%/*}" && npm $(if $(UPGRADE),update,install) --package-lock-only --ignore-scripts --silent \
		--no-audit --no-fund --omit-lockfile-registry-resolved) || exit 1; done
	$(BIN)/uv pip compile --no-config --no-deps --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command 'make lock' --quiet \
		$(if $(UPGRADE),--upgrade) bench/stand/triton/requirements.in -o bench/stand/triton/requirements.lock

protos: .venv/.ready
	cd headway/protos && ../../$(BIN)/python -m grpc_tools.protoc -I. --descriptor_set_out=/dev/stdout \
		$$(find . -name '*.proto' | LC_ALL=C sort | sed 's|^\./||') | ../../$(BIN)/python -c 'import sys; \
		from google.protobuf import descriptor_pb2 as d, json_format as j; \
		print(j.MessageToJson(d.FileDescriptorSet.FromString(sys.stdin.buffer.read()), indent=1))' > descriptors.json

audit: .venv/.ready
	$(BIN)/pip-audit --strict --require-hashes --disable-pip -r requirements.lock

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist bench/out mutants
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A virtual environment whose Python is gone or too old is made anew.
define environment
@command -v $(PYTHON) >/dev/null || { \
	echo "$(PYTHON) is not on the path. Headway needs Python 3.11 or later: install it, or name one: make PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); Headway needs Python 3.11 or later: install one and name it: make PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "$(PYTHON) lacks the venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear .venv
endef

# Most modules of what is installed are never imported, and Python compiles those that are: a third less disk, half the time.
.venv/.ready-serve: requirements-serve.lock pyproject.toml
	$(environment)
	@echo "Setting up .venv from requirements-serve.lock, 12 MB to download …"
	@$(INSTALL) --no-compile -r requirements-serve.lock
	@$(EDITABLE)
	@touch $@

# Its lock holds what serving needs, too.
.venv/.ready: requirements-dev.lock requirements-serve.lock pyproject.toml
	$(environment)
	@echo "Setting up .venv from requirements-dev.lock, 150 MB to download …"
	@$(INSTALL) -r requirements-dev.lock
	@$(EDITABLE)
	@touch .venv/.ready-serve $@

.venv/.ready-dist: .venv/.ready-serve requirements-dist.lock
	@echo "Adding requirements-dist.lock …"
	@$(INSTALL) -r requirements-dist.lock
	@touch $@

.venv/.ready-bench: .venv/.ready requirements-bench.lock
	@echo "Adding requirements-bench.lock …"
	@$(INSTALL) -r requirements-bench.lock
	@touch $@

.venv/.ready-examples: .venv/.ready-serve requirements-examples.lock
	@echo "Adding requirements-examples.lock …"
	@$(INSTALL) -r requirements-examples.lock
	@touch $@

.venv/.ready-mutants: .venv/.ready requirements-mutants.lock
	@echo "Adding requirements-mutants.lock …"
	@$(INSTALL) -r requirements-mutants.lock
	@touch $@

# In an environment of its own: its client library, which is not installed, would want an older protobuf than ours.
.venv/triton/.ready: bench/stand/triton/requirements.lock | .venv/.ready
	@echo "Setting up .venv/triton from bench/stand/triton/requirements.lock …"
	@$(PYTHON) -m venv --clear .venv/triton
	@.venv/triton/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes \
		-r bench/stand/triton/requirements.lock
	@touch $@

# Which build of torch fits depends on the machine, so it is pinned in pyproject.toml but not locked by hash. Without a GPU it is
# the CPU build: where pip is offered one it takes that, else uv, which knows where PyTorch keeps it.
.venv/.ready-embeddings: .venv/.ready-serve requirements-embeddings.lock
	@echo "Adding requirements-embeddings.lock, 200 MB to download, some minutes …"
	@$(PIP) install $(QUIET) --no-deps --require-hashes -r requirements-embeddings.lock
	@torch=$(or $(TORCH),$$(sed -n 's/^embeddings = .*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)); \
	if [ -n "$(TORCH)" ] || nvidia-smi -L >/dev/null 2>&1; then \
		echo "Adding $$torch, 5.7 GB on the disk with what it needs for GPUs, some minutes …"; $(PIP) install $(QUIET) "$$torch"; \
	else echo "Adding $$torch for the CPU, 200 MB to download, some minutes …"; \
		$(PIP) install $(QUIET) --no-deps "$$torch+cpu" 2>/dev/null \
		|| $(BIN)/uv pip install $(QUIET) --python $(BIN)/python --no-deps --torch-backend cpu "$$torch" \
		|| { echo "There is no GPU, and no CPU build of $$torch was found. The default build (5.7 GB): make example-embeddings TORCH=$$torch" >&2; exit 1; }; fi
	@touch $@

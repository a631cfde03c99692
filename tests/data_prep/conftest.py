"""Small tokenizers, trained on the spot, and a target that answers."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from outrider.data_prep.text.settings import DataConfig
from outrider.inference.batch.settings import GenerateConfig
from tests.data_prep.responding import ENDS, TALKS, letter_tokenizer
from tests.tiny import save_target

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINES = [
    "def add(first, second):",
    "    return first + second",
    "Hello there, how are you?",
    "USER: ASSISTANT:",
]


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    def make(
        *, bos: bool = False, eos: bool = True, chat_template: str | None = CHATML, trim_offsets: bool = False
    ) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(LINES * 4, trainer)
        if bos:
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        elif trim_offsets:
            backend.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>" if eos else None
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer()


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
    monkeypatch.setattr("outrider.inference.batch.generate.join_processes", lambda: alone)


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

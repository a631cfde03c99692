"""Small tokenizers, trained on the spot."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINES = [
    "def add(first, second):", "    return first + second", "Hello there, how are you?", "USER: ASSISTANT:",
]  # fmt: skip


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

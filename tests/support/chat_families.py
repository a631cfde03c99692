"""Chat templates in the style of eleven families, their special tokens, and answers as their models write them."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


class Family(NamedTuple):
    """A template, special and other added tokens, what ends an answer, and two answers without that."""

    template: str
    special: Sequence[str]
    end: str
    first: str = "Seven, of course."
    second: str = " Eleven \n"
    plain: Sequence[str] = ()


_THOUGHTS = ("<think>\nA prime.\n</think>\n\nSeven.", "<think>\nOne more.\n</think>\n\nEleven.")
_THINK = ("<think>", "</think>")
_IM = ("<|im_start|>", "<|im_end|>")
# Thoughts are dropped once a user has asked again; a last answer without any is given empty ones.
_LAST = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}"
)
_REWRITTEN = (
    "{%- set said = m.content.split('</think>')[-1].lstrip('\\n') -%}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content -%}"
)

FAMILIES = {
    "qwen2": Family(
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        _IM, "<|im_end|>",
    ),
    "qwen3": Family(
        _LAST + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}" + _REWRITTEN +
        "{{- '<|im_start|>assistant\n' -}}{%- if loop.index0 > ns.last -%}"
        "{{- '<think>\n' + (thought or '') + '\n</think>\n\n' -}}{%- endif -%}{{- said + '<|im_end|>\n' -}}"
        "{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
        _IM, "<|im_end|>", *_THOUGHTS, _THINK,
    ),
    "gemma": Family(
        "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' + m.content | trim + "
        "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>",
    ),
    "mistral": Family(
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", " Seven, of course.", " Eleven.",
    ),
    "gpt_oss": Family(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if '<|channel|>' in m.content %}"
        "{{ raise_exception('channels in a content') }}{% endif %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"), "<|return|>",
        "<|channel|>analysis<|message|>A prime.<|end|><|start|>assistant<|channel|>final<|message|>Seven.",
        "<|channel|>analysis<|message|>One more.<|end|><|start|>assistant<|channel|>final<|message|>Eleven.",
    ),
    "glm4": Family(
        "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"), "<|user|>", "Seven.", "Eleven.", _THINK,
    ),
    "phi": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), "<|end|>",
    ),
    "exaone4": Family(
        _LAST + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}" + _REWRITTEN +
        "{{- '[|assistant|]\n' -}}{%- if loop.index0 > ns.last -%}{{- '<think>\n' + (thought or '') + '\n</think>\n\n' "
        "-}}{%- endif -%}{{- said + '[|endofturn|]\n' -}}"
        "{%- else -%}{{- '[|' + m.role + '|]\n' + m.content + '\n' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '[|assistant|]\n<think>\n' -}}{%- endif -%}",
        ("[|user|]", "[|assistant|]", "[|endofturn|]"), "[|endofturn|]",
        "A prime.\n</think>\n\nSeven.", "One more.\n</think>\n\nEleven.", _THINK,
    ),
    "spaced": Family(
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ '<end>' if m.role == 'assistant' else '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
        ("<end>",), "<end>", "Seven", "Seven is one",
    ),
    "llama2": Family(  # the system's text is inside the first turn
        "{% set ns = namespace(head='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.head = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}{% elif m.role == 'user' %}"
        "{{ '<s>[INST] ' + ns.head + m.content + ' [/INST]' }}{% set ns.head = '' %}"
        "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}",
        ("<s>", "</s>"), " </s>", " Seven.", " Eleven.",
    ),
    "field": Family(  # a thought has a field of its own, and stays in the history
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        _IM, "<|im_end|>", "<think>A prime.</think>Seven.", "<think>One more.</think>Eleven.", _THINK,
    ),
}  # fmt: skip
REWRITING = {"qwen3", "gpt_oss", "exaone4"}  # whose templates do not give a history back


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """One of bytes, with merges, so that a text may be written in several ways."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("S", "e"), ("Se", "v"), ("e", "n"), ("p", "r"), ("pr", "i"), ("m", "e"), ("Ġ", "Sev")]
    vocabulary = {piece: number for number, piece in enumerate([*letters, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in family.special])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in family.plain])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.end)
    tokenizer.chat_template = family.template
    return tokenizer


def byte_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece's BPE: what has no piece of its own is spelt in bytes."""
    words = ["<unk>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", *"abcdefghiklmnorstuvwxyz"]
    words += ["▁t", "▁th", "▁the", "at", "▁c", "▁cat"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def cleaning() -> PreTrainedTokenizerFast:
    """A Unigram model whose decoding cleans up spaces."""
    words = ["▁the", "▁cat", "▁is", "▁'", "▁.", "▁n", "'t", "'s"]
    pieces = ["<unk>", "</s>", "▁", *"abcdefghiklmnorstuvwxyz.?!,'", *words]
    vocabulary = [(piece, -1.0 - len(pieces) / 100 * (len(piece) == 1)) for piece in pieces]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=True
    )

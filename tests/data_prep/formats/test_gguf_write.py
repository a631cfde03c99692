"""Models written as GGUF files: what is read again is the model that was given, or it is refused beforehand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from data_prep.formats.gguf_file import GgufFile, open_gguf
from data_prep.formats.gguf_tokenizer import gguf_tokenizer
from data_prep.formats.gguf_write import require_gguf, write_gguf
from draft_models.targets.model_files import load_causal_lm
from draft_models.targets.open_target import load_tokenizer
from outrider.errors import UserError
from tests.data_prep.formats.test_gguf import VARIANTS as WINDOWED
from tests.data_prep.formats.test_gguf import random_biases, same_model
from tests.data_prep.formats.test_gguf_tokenizers import CUTS, TEXTS, byte_level, sentencepiece, spm_file  # noqa: F401
from tests.gguf_files import TEMPLATE, bpe_tokenizer, save_plain_target
from tests.gguf_files import write_gguf as as_converted

VARIANTS = {**WINDOWED, "mistral": ("mistral", {"sliding_window": None})}
REFUSED = ("linear", "yarn")
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in REFUSED])
def test_the_file_is_that_of_the_converter(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    source = save_plain_target(tmp_path / "model", architecture, **changes)
    random_biases(source)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(source).eval(),
        PreTrainedTokenizerFast.from_pretrained(source),
    )
    tokenizer.chat_template = TEMPLATE
    write_gguf(model, tokenizer, tmp_path / "ours.gguf")
    theirs = as_converted(source, tmp_path / "theirs.gguf", template=TEMPLATE)
    assert same_model(load_causal_lm(str(tmp_path / "ours.gguf"), dtype=torch.float32).eval(), model)
    one, other = (GGUFReader(path) for path in (tmp_path / "ours.gguf", theirs))
    tensors = [{tensor.name: tensor for tensor in reader.tensors} for reader in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(np.allclose(tensors[0][name].data, tensors[1][name].data, rtol=1e-5) for name in tensors[0])
    found, wanted = (open_gguf(path).metadata for path in (tmp_path / "ours.gguf", theirs))
    if architecture == "qwen2":  # transformers gives its tokenizers tokens that this file has not
        wanted = {key: value for key, value in wanted.items() if not key.startswith("tokenizer.")}
    assert {key: found[key] for key in wanted} == wanted
    assert load_tokenizer(str(tmp_path / "ours.gguf")).chat_template == TEMPLATE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_stay_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    source = save_plain_target(tmp_path / "model", vocab_size=330)  # ten rows that are no token
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    write_gguf(model, bpe_tokenizer(), tmp_path / "model.gguf")
    read = load_causal_lm(str(tmp_path / "model.gguf"), dtype=dtype).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())
    assert len(open_gguf(tmp_path / "model.gguf").texts("tokenizer.ggml.tokens")) == 330


@pytest.mark.parametrize("pre", CUTS)
def test_the_way_of_cutting_texts_is_found(pre: str) -> None:
    assert require_gguf(LlamaConfig(vocab_size=500, **SHAPE), byte_level(pre))["tokenizer.ggml.pre"] == pre


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_sentencepiece_tokenizer_is_written(
    prefixed: bool,
    tmp_path: Path,
    sentencepiece: SentencePieceProcessor,  # noqa: F811
) -> None:
    source = spm_file(tmp_path / "m.gguf", sentencepiece, add_space_prefix=prefixed, add_bos_token=prefixed)
    tokenizer = gguf_tokenizer(open_gguf(source))
    found = require_gguf(LlamaConfig(vocab_size=700, **SHAPE), tokenizer)
    assert found["tokenizer.ggml.add_space_prefix"] == found["tokenizer.ggml.add_bos_token"] == prefixed
    again = gguf_tokenizer(GgufFile(source, found, {}))
    for text in (*TEXTS, Path(__file__).read_text()):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def foreign(kind: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if kind == "words":
        return PreTrainedTokenizerFast(tokenizer_object=words)
    return bpe_tokenizer(pre_tokenizers.Split(Regex(r"\p{L}"), "isolated"), size=400)


PREPEND, REPLACE = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")


def spaced(*steps: Any, order: tuple[int, ...] = (0, 1, 2, 3, 4), added: AddedToken | None = None) -> Any:
    """A byte-fallback BPE. steps: of its normalizer, and a pre-tokenizer; order: of its merges, else that of ids."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "q"]
    pieces += ["ab", "bc", "abc", "▁a"]
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c"), ("▁", "a")]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    bpe = models.BPE(
        vocab=vocabulary,
        merges=[merges[place] for place in order],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(bpe)
    given = steps or (PREPEND, REPLACE)
    backend.normalizer = normalizers.Sequence([one for one in given if isinstance(one, normalizers.Normalizer)])
    for one in given:
        if isinstance(one, pre_tokenizers.PreTokenizer):
            backend.pre_tokenizer = one
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    if added is not None:
        tokenizer.add_tokens([added])
    return tokenizer


def never_met(*steps: Any) -> Any:
    """A byte-level tokenizer with steps of normalisation."""
    tokenizer = bpe_tokenizer(size=400)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([*steps])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "written"),
    [
        (spaced(), True),
        (spaced(REPLACE), True),
        (spaced(REPLACE, pre_tokenizers.Split(" ", "merged_with_previous")), True),
        (spaced(pre_tokenizers.Metaspace("▁", "never", split=False)), True),
        (spaced(added=AddedToken("qq", normalized=False)), True),
        (never_met(), True),
        (spaced(order=(1, 0, 2, 3, 4)), False),
        (spaced(order=(0, 1, 3, 2, 4)), False),
        (spaced(order=(0, 1, 2, 4)), False),
        (spaced(PREPEND, REPLACE, normalizers.Replace("qq", "a")), False),
        (spaced(normalizers.Replace(Regex("z{5,}"), ""), PREPEND, REPLACE), False),
        (spaced(PREPEND, REPLACE, normalizers.Replace("unheard of", "b")), False),
        (spaced(pre_tokenizers.Metaspace("▁", "first", split=False)), False),
        (spaced(pre_tokenizers.Metaspace("▁", "never", split=True)), False),
        (spaced(PREPEND, REPLACE, pre_tokenizers.Split("unheard of", "isolated")), False),
        (spaced(added=AddedToken("qq", normalized=False, single_word=True)), False),
        (never_met(normalizers.Replace("unheard of", "b")), False),
        (never_met(normalizers.NFKC()), False),
    ],
)
def test_rules_that_no_text_of_ours_meets_are_compared(tokenizer: Any, written: bool) -> None:
    config = LlamaConfig(vocab_size=500, **SHAPE)
    if written:
        read = gguf_tokenizer(GgufFile(Path("m.gguf"), require_gguf(config, tokenizer), {}))
        for text in (*TEXTS, "abc a bc abca qqabc"):
            assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    else:
        with pytest.raises(UserError, match="GGUF: cannot be written here of a tokenizer"):
            require_gguf(config, tokenizer)


ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "tokenizer", "named"),
    [
        (OPTConfig(), None, "model_type='opt'; it is written of llama, qwen2, qwen3 and mistral"),
        (MistralConfig(sliding_window=8, **SHAPE), None, "sliding_window=8, as llama.cpp lets a Mistral see all"),
        (LlamaConfig(hidden_act="gelu", **SHAPE), None, "hidden_act='gelu'"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, **SHAPE),
            None,
            "dynamic",
        ),
        (LlamaConfig(rope_parameters={**ROPE, "original_max_position_embeddings": 4096}, **SHAPE), None, "4096"),
        (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0, **SHAPE), None, "layer_types"),
        (LlamaConfig(vocab_size=300, **SHAPE), bpe_tokenizer(), "320 tokens of a model with vocab_size=300"),
        (LlamaConfig(vocab_size=300, **SHAPE), foreign("words"), "a tokenizer without merges"),
        (LlamaConfig(vocab_size=400, **SHAPE), foreign("letters"), "a tokenizer that cuts"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_what_would_be_read_otherwise_is_refused(config: Any, tokenizer: Any, named: str) -> None:
    with pytest.raises(UserError, match="GGUF: cannot be written here of ") as raised:
        require_gguf(config, tokenizer)
    assert named in str(raised.value)

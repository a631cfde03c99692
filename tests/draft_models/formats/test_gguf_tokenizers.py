"""Tokenizers in GGUF files, read and written: the ids of the one that was given, or a refusal."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from outrider.base.errors import UserError
from outrider.draft_models.formats.gguf_file import GgufFile, open_gguf
from outrider.draft_models.formats.gguf_tokenizer import gguf_tokenizer
from outrider.draft_models.formats.gguf_write import require_gguf, write_gguf
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.open_target import load_tokenizer
from tests import gguf_files
from tests.draft_models.formats.test_gguf import VARIANTS as WINDOWED
from tests.draft_models.formats.test_gguf import same_model
from tests.gguf_files import write_gguf as as_converted
from tests.refusals import refusal
from tests.tiny import shake_norms_and_biases

TEXTS = (
    "The tide comes in at seven o'clock; they're 12345 metres away.",
    "  two spaces\n\n\tand a tab, naïve café — “quoted” 日本語 🙂",
    "def f(x):\n    return x ** 2  # it's 3.14\r\n",
    "e\u0301 is é",
)
LLAMA3_CUT = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")  # the only way in which Llama 3 cuts otherwise
CUTS: dict[str, tuple[Any, Any]] = {
    "gpt-2": (None, None),
    "smollm": (pre_tokenizers.Digits(individual_digits=True), None),
    "llama-bpe": (pre_tokenizers.Split(Regex(LLAMA3_CUT), "isolated"), None),
    "qwen2": (pre_tokenizers.Split(Regex(QWEN2), "isolated"), normalizers.NFC()),
}


def byte_level(pre: str) -> Any:
    before, normalizer = CUTS[pre]
    if pre != "smollm":
        return gguf_files.bpe_tokenizer(before, normalizer, 500)
    tokenizer = gguf_files.bpe_tokenizer(before, normalizer, 500)  # its ByteLevel cuts too
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([before, plain])
    return tokenizer


@pytest.mark.parametrize("pre", CUTS)
def test_a_byte_level_tokenizer_is_the_one_that_was_written(tmp_path: Path, pre: str) -> None:
    source = gguf_files.save_plain_target(tmp_path / "model", vocab_size=500)
    original = byte_level(pre)
    original.save_pretrained(source)
    original = AutoTokenizer.from_pretrained(source)
    tokenizer = load_tokenizer(str(as_converted(source, tmp_path / "model.gguf", pre=pre)))
    assert tokenizer.get_vocab() == original.get_vocab()
    for text in (*TEXTS, Path(__file__).read_text()):
        assert tokenizer(text)["input_ids"] == original(text)["input_ids"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == original.decode(original(text)["input_ids"])
    assert tokenizer("a<s>b")["input_ids"].count(original.bos_token_id) == 1
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    assert AutoTokenizer.from_pretrained(saved)(TEXTS[1])["input_ids"] == original(TEXTS[1])["input_ids"]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_llama_3_takes_a_word_that_is_a_token_whole(tmp_path: Path, written: Path, pre: str) -> None:
    """Also where no merges lead to it, as in its own tokenizer.json ("ignore_merges")."""
    path = shutil.copy(written, tmp_path / "model.gguf")
    plain = load_tokenizer(str(path))
    word = max((token for token in plain.get_vocab() if token.isalpha() and token.isascii()), key=len)
    assert len(word) > 2
    merges = [merge for merge in open_gguf(path).texts("tokenizer.ggml.merges") if merge.replace(" ", "") != word]
    other = gguf_files.rewritten(path, **{"tokenizer.ggml.merges": merges, "tokenizer.ggml.pre": pre})
    assert (len(load_tokenizer(str(other))(word)["input_ids"]) == 1) == (pre == "llama-bpe")


def test_other_cuts_make_other_ids() -> None:
    """Or the test above would pass with any."""
    text = " ".join(TEXTS)
    ids = {pre: tuple(byte_level(pre)(text)["input_ids"]) for pre in CUTS}
    assert len(set(ids.values())) == len(CUTS)


@pytest.mark.parametrize(("key", "place"), [("bos", 0), ("eos", -1)])
def test_tokens_around_a_text(tmp_path: Path, written: Path, key: str, place: int) -> None:
    plain = load_tokenizer(str(written))
    tokenizer = load_tokenizer(str(gguf_files.rewritten(written, **{f"tokenizer.ggml.add_{key}_token": True})))
    ids = tokenizer("hello")["input_ids"]
    assert ids.pop(place) == getattr(plain, f"{key}_token_id")
    assert ids == plain("hello")["input_ids"] == tokenizer("hello", add_special_tokens=False)["input_ids"]
    (written.parent / "rewritten.gguf").unlink()


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceProcessor:
    return trained(tmp_path_factory.mktemp("sentencepiece"), "<tool>")


def trained(folder: Path, *user_defined: str) -> SentencePieceProcessor:
    text = folder / "text.txt"
    text.write_text((Path(__file__).read_text() + "naïve café\n") * 3)
    SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "m"), vocab_size=700, model_type="bpe", byte_fallback=True,
        user_defined_symbols=[*user_defined], minloglevel=2, normalization_rule_name="identity", split_digits=True,
        remove_extra_whitespaces=False,
    )  # fmt: skip
    return SentencePieceProcessor(model_file=str(folder / "m.model"))


def spm_file(
    path: Path,
    pieces: SentencePieceProcessor,
    architecture: str = "llama",
    user_defined: tuple[str, ...] = ("<tool>",),
    **more: Any,
) -> Path:
    """A GGUF file of a SentencePiece model alone, as llama.cpp's converter writes one."""
    count = range(pieces.get_piece_size())
    writer = gguf_files.GgufWriter(path, architecture)
    kinds = {True: gguf_files.CONTROL}
    writer.add("tokenizer.ggml.model", "llama")
    tokens, scores = [pieces.id_to_piece(i) for i in count], [float(pieces.get_score(i)) for i in count]
    for place in map(pieces.piece_to_id, user_defined):  # whose ▁ the converter replaces
        tokens[place], scores[place] = tokens[place].replace("▁", " "), -1000.0
    writer.add("tokenizer.ggml.tokens", tokens)
    writer.add("tokenizer.ggml.scores", scores)
    types = [gguf_files.UNKNOWN if pieces.is_unknown(i) else gguf_files.BYTE if pieces.is_byte(i) else
             kinds.get(pieces.is_control(i), gguf_files.NORMAL) for i in count]  # fmt: skip
    for piece in user_defined:
        types[pieces.piece_to_id(piece)] = gguf_files.USER_DEFINED
    writer.add("tokenizer.ggml.token_type", types)
    for key, index in (("bos", pieces.bos_id()), ("eos", pieces.eos_id()), ("unknown", pieces.unk_id())):
        writer.add(f"tokenizer.ggml.{key}_token_id", index)
    for key, value in more.items():
        writer.add(f"tokenizer.ggml.{key}", value)
    return writer.close()


def test_a_sentencepiece_tokenizer_is_the_one_that_was_written(
    tmp_path: Path, sentencepiece: SentencePieceProcessor
) -> None:
    """Its ids are SentencePiece's own, with the beginning that a Llama's files leave unsaid."""
    tokenizer = gguf_tokenizer(open_gguf(spm_file(tmp_path / "m.gguf", sentencepiece)))
    for text in (*TEXTS, Path(__file__).with_name("test_gguf.py").read_text()):
        ids = tokenizer(text)["input_ids"]
        assert ids == [sentencepiece.bos_id(), *sentencepiece.encode(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert sentencepiece.piece_to_id("<tool>") in tokenizer("a <tool> b")["input_ids"]
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(TEXTS[1])["input_ids"] == tokenizer(TEXTS[1])["input_ids"]


def test_a_space_before_a_text_is_the_files_choice(tmp_path: Path, sentencepiece: SentencePieceProcessor) -> None:
    path = spm_file(tmp_path / "m.gguf", sentencepiece, add_space_prefix=False, add_bos_token=False)
    tokenizer = gguf_tokenizer(open_gguf(path))
    ids = tokenizer("the tide")["input_ids"]
    assert not tokenizer.convert_ids_to_tokens(ids)[0].startswith("▁")
    assert tokenizer.decode(ids) == "the tide"
    assert tokenizer.decode(tokenizer(" the tide")["input_ids"]) == " the tide"


def test_gemma_joins_spaces_to_user_defined_tokens(tmp_path: Path) -> None:
    """As its Hugging Face tokenizer does, which transformers makes of the file, too."""
    spaces = ("<tool>", "▁▁", "▁▁▁", "▁▁▁▁")
    sentencepiece = trained(tmp_path, *spaces)
    path = tmp_path / "m.gguf"
    spm_file(path, sentencepiece, architecture="gemma3", user_defined=spaces, add_space_prefix=False)
    tokenizer = gguf_tokenizer(open_gguf(path))
    architecture, described, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, described)
    for text in (*TEXTS, "a  b    c        d", Path(__file__).with_name("test_gguf.py").read_text()):
        ids = tokenizer(text)["input_ids"]
        assert ids == [sentencepiece.bos_id(), *theirs.encode(text, add_special_tokens=False).ids]
        assert tokenizer.decode(ids[1:]) == text
    assert sentencepiece.piece_to_id("▁▁") in tokenizer("a  b")["input_ids"]


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_phi_3_drops_spaces_after_its_own_tokens(
    tmp_path: Path, sentencepiece: SentencePieceProcessor, architecture: str
) -> None:
    tokenizer = gguf_tokenizer(open_gguf(spm_file(tmp_path / "m.gguf", sentencepiece, architecture=architecture)))
    one, other = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("</s>\n\nthe", "</s>the"))
    assert (one == other) == (architecture == "phi3")
    assert tokenizer("<s> the")["input_ids"] != tokenizer("<s>the")["input_ids"]


VARIANTS = {**WINDOWED, "mistral": ("mistral", {"sliding_window": None})}
REFUSED = ("linear", "yarn")
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in REFUSED])
def test_the_file_is_that_of_the_converter(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    source = gguf_files.save_plain_target(tmp_path / "model", architecture, **changes)
    shake_norms_and_biases(source)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(source).eval(),
        PreTrainedTokenizerFast.from_pretrained(source),
    )
    tokenizer.chat_template = gguf_files.TEMPLATE
    write_gguf(model, tokenizer, tmp_path / "ours.gguf")
    theirs = as_converted(source, tmp_path / "theirs.gguf", template=gguf_files.TEMPLATE)
    assert same_model(load_causal_lm(str(tmp_path / "ours.gguf"), dtype=torch.float32).eval(), model)
    one, other = (GGUFReader(path) for path in (tmp_path / "ours.gguf", theirs))
    tensors = [{tensor.name: tensor for tensor in reader.tensors} for reader in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(np.allclose(tensors[0][name].data, tensors[1][name].data, rtol=1e-5) for name in tensors[0])
    found, wanted = (open_gguf(path).metadata for path in (tmp_path / "ours.gguf", theirs))
    if architecture == "qwen2":  # transformers gives its tokenizers tokens that this file has not
        wanted = {key: value for key, value in wanted.items() if not key.startswith("tokenizer.")}
    assert {key: found[key] for key in wanted} == wanted
    assert load_tokenizer(str(tmp_path / "ours.gguf")).chat_template == gguf_files.TEMPLATE


def test_what_files_leave_out_and_fill_up(tmp_path: Path) -> None:
    """A Llama 3 begins a text by BOS without a key that says so. Names of rows that no token has are no words."""
    file = open_gguf(as_converted(gguf_files.save_plain_target(tmp_path / "target"), tmp_path / "m.gguf"))
    found = {key: value for key, value in file.metadata.items() if key != "tokenizer.ggml.add_bos_token"}
    plain, llama3 = (
        gguf_tokenizer(GgufFile(file.path, found | {"tokenizer.ggml.pre": pre}, {})) for pre in ("gpt-2", "llama-bpe")
    )
    assert llama3("ab")["input_ids"] == [llama3.bos_token_id, *llama3("ab", add_special_tokens=False)["input_ids"]]
    assert plain("ab")["input_ids"][0] != plain.bos_token_id
    tokens, types = (found[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    for kind in (4, 5):  # a user's own, as old converters wrote, and unused
        filled = {
            "tokenizer.ggml.tokens": [*tokens, f"[PAD{len(tokens)}]"],
            "tokenizer.ggml.token_type": [*types, kind],
        }
        assert gguf_tokenizer(GgufFile(file.path, found | filled, {})).get_vocab() == plain.get_vocab()


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_sentencepiece_tokenizer_is_written(
    prefixed: bool, tmp_path: Path, sentencepiece: SentencePieceProcessor
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
    return gguf_files.bpe_tokenizer(pre_tokenizers.Split(Regex(r"\p{L}"), "isolated"), size=400)


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
    tokenizer = gguf_files.bpe_tokenizer(size=400)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([*steps])
    return tokenizer


@pytest.mark.parametrize(("tokenizer", "written"), [
    (spaced(), True),
    (spaced(REPLACE, pre_tokenizers.Split(" ", "merged_with_previous")), True),
    (spaced(pre_tokenizers.Metaspace("▁", "never", split=False)), True),
    (spaced(added=AddedToken("qq", normalized=False)), True),
    (never_met(), True),
    (spaced(order=(1, 0, 2, 3, 4)), False),
    (spaced(order=(0, 1, 2, 4)), False),
    (spaced(normalizers.Replace(Regex("z{5,}"), ""), PREPEND, REPLACE), False),
    (spaced(PREPEND, REPLACE, normalizers.Replace("unheard of", "b")), False),
    (spaced(pre_tokenizers.Metaspace("▁", "never", split=True)), False),
    (spaced(PREPEND, REPLACE, pre_tokenizers.Split("unheard of", "isolated")), False),
    (spaced(added=AddedToken("qq", normalized=False, single_word=True)), False),
    (never_met(normalizers.Replace("unheard of", "b")), False),
])  # fmt: skip
def test_rules_that_no_text_of_ours_meets_are_compared(tokenizer: Any, written: bool) -> None:
    config = LlamaConfig(vocab_size=500, **SHAPE)
    if written:
        read = gguf_tokenizer(GgufFile(Path("m.gguf"), require_gguf(config, tokenizer), {}))
        for text in (*TEXTS, "abc a bc abca qqabc"):
            assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    else:
        refusal("GGUF: not supported here: a tokenizer", require_gguf, config, tokenizer)


ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "tokenizer", "named"),
    [
        (OPTConfig(), None, "model_type='opt', other than llama, qwen2, qwen3 and mistral"),
        (MistralConfig(sliding_window=8, **SHAPE), None, "sliding_window=8, which llama.cpp ignores in a Mistral"),
        (LlamaConfig(hidden_act="gelu", **SHAPE), None, "hidden_act='gelu'"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, **SHAPE),
            None,
            "dynamic",
        ),
        (LlamaConfig(rope_parameters={**ROPE, "original_max_position_embeddings": 4096}, **SHAPE), None, "4096"),
        (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0, **SHAPE), None, "layer_types"),
        (LlamaConfig(vocab_size=300, **SHAPE), gguf_files.bpe_tokenizer(), "320 tokens of a model with vocab_size=300"),
        (LlamaConfig(vocab_size=300, **SHAPE), foreign("words"), "a tokenizer without merges"),
        (LlamaConfig(vocab_size=400, **SHAPE), foreign("letters"), "a tokenizer that cuts"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_what_would_be_read_otherwise_is_refused(config: Any, tokenizer: Any, named: str) -> None:
    with pytest.raises(UserError, match="GGUF: not supported here: ") as raised:
        require_gguf(config, tokenizer)
    assert named in str(raised.value)

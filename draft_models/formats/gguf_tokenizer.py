"""The tokenizer of a GGUF file: the Hugging Face tokenizer it was converted from, rebuilt from its metadata.

transformers 5 rebuilds one too, which gives other ids to some texts if the tokenizer is Qwen2's, StarCoder's, Falcon's
or a SentencePiece tokenizer other than Gemma's.
"""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as _QWEN2

from outrider.base.errors import UserError, reason
from outrider.draft_models.formats.gguf_file import AS_WRITTEN, GgufFile, MetadataValue

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # types of tokens, in "token_type"
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "▁"  # SentencePiece's space
_SPACE_AFTER = ("<unk>", "<s>", "<|endoftext|>")  # the only tokens of Phi 3 that leave a space after them

# The patterns that split a text before merges apply, as in the models' published tokenizer.json.
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("gpt-2", "smollm", "starcoder", "refact", "falcon"), None),
}


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer of the model in `file`, with its chat template. Raises `UserError` naming an unsupported value."""
    bpe_kind = file.get(f"{_KEY}model", str)
    if bpe_kind not in ("gpt2", "llama"):
        raise UserError(
            f"{file.path}: {_KEY}model={bpe_kind!r}; supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)"
        )
    tokens = file.texts(f"{_KEY}tokens")
    if _is_gemma(file):  # llama.cpp's converter replaces ▁ by a space in user-defined tokens
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    try:
        tokenizer = (_make_byte_level if bpe_kind == "gpt2" else _make_sentencepiece)(file, tokens)
        _add_tokens(tokenizer, file, tokens)
        special_ids = {name: file.get(f"{_KEY}{key}_token_id", int, None) for name, key in SPECIAL.items()}
        pairs = [(name, index) for name, index in special_ids.items() if index is not None]
        special_tokens = {name: _token_of_id(file, tokens, f"{SPECIAL[name]}_token_id", index) for name, index in pairs}
        tokenizer.post_processor = _make_post_processor(file, bpe_kind, special_tokens, tokens)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            chat_template=file.get("tokenizer.chat_template", str, None),
            clean_up_tokenization_spaces=False,
            model_max_length=file.get(f"{file.metadata['general.architecture']}.context_length", int, None),
            **special_tokens,
            **{AS_WRITTEN: True},  # a loader takes tokenizer.json as it is
        )
    except UserError:
        raise
    except Exception as error:  # any error of tokenizers for pieces that do not fit together
        raise UserError(f"{file.path}: no usable tokenizer ({reason(error)}); convert the model again") from error


def _make_byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """A byte-level BPE. The file's "pre" names how texts are cut. Raises `UserError` for an unknown name."""
    split_name = file.get(f"{_KEY}pre", str)
    if split_name not in PATTERNS:
        raise UserError(
            f"{file.path}: {_KEY}pre={split_name!r}: texts are cut in an unknown way; known: {', '.join(PATTERNS)}"
        )
    merges = [(prefix, suffix) for prefix, _, suffix in (merge.partition(" ") for merge in file.texts(f"{_KEY}merges"))]
    pattern = PATTERNS[split_name]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(file, tokens), merges=merges, ignore_merges=pattern == _LLAMA3))
    if pattern == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    pre_steps: list[pre_tokenizers.PreTokenizer] = []
    if pattern is not None:
        pre_steps = [pre_tokenizers.Split(Regex(pattern), "isolated")]
    elif split_name in ("smollm", "starcoder", "refact"):
        pre_steps = [pre_tokenizers.Digits(individual_digits=True)]
    elif split_name == "falcon":
        pre_steps = [pre_tokenizers.Punctuation("contiguous")]
    pre_steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    if split_name == "falcon":
        by_threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        pre_steps += [pre_tokenizers.Digits(individual_digits=False), by_threes]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pre_steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _make_sentencepiece(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece's BPE: a space is ▁, often with a further ▁ before the text, and unknown letters become bytes."""
    unknown_id = file.get(f"{_KEY}unknown_token_id", int, 0)
    vocab, merges = _vocabulary(file, tokens), _make_merges(file, tokens)
    unknown = _token_of_id(file, tokens, "unknown_token_id", unknown_id)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    adds_space = file.get(f"{_KEY}add_space_prefix", bool, not _is_gemma(file))
    prepend_steps = [normalizers.Prepend(_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend_steps, normalizers.Replace(" ", _SPACE)])
    strip_steps = [decoders.Strip(" ", 1, 0)] if adds_space else []
    decoder_steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip_steps]
    tokenizer.decoder = decoders.Sequence(decoder_steps)
    return tokenizer


def _make_merges(file: GgufFile, tokens: Sequence[str]) -> list[tuple[str, str]]:
    """All splits of a token into two tokens, best token first: merges equivalent to SentencePiece's BPE with scores.

    SentencePiece joins the two neighbours whose concatenation has the highest score. Example: of the tokens a, b, c, ab
    (score −1) and abc (score −2) the merges are (a, b), then (ab, c). Gemma's Hugging Face tokenizers rank merges by
    the id of the joined token, then the longer prefix first, not by its score. There that token may be user-defined.
    """
    stored_scores, token_types = file.get(f"{_KEY}scores", list), _read_types(file, tokens)
    scores = [score for score in stored_scores if isinstance(score, float)]
    if len(scores) != len(tokens):
        raise UserError(f"{file.path}: {_KEY}scores has {len(scores)} values for {len(tokens)} tokens; fetch it again")
    is_gemma = _is_gemma(file)
    merged_types = (_NORMAL, _USER_DEFINED) if is_gemma else (_NORMAL,)
    id_of = {token: token_id for token_id, token in enumerate(tokens) if token_types[token_id] in merged_types}
    keyed_merges: list[tuple[float, int, int, int, str, str]] = []  # four numbers to sort by, and the merge
    for token, token_id in id_of.items():
        splits = ((token[:split_at], token[split_at:]) for split_at in range(1, len(token)))
        for prefix, suffix in splits:
            if prefix in id_of and suffix in id_of:
                sort_key = (0.0, token_id, -len(prefix)) if is_gemma else (-scores[token_id], token_id, id_of[prefix])
                keyed_merges.append((*sort_key, id_of[suffix], prefix, suffix))
    return [(prefix, suffix) for *_, prefix, suffix in sorted(keyed_merges)]


def _is_gemma(file: GgufFile) -> bool:
    return str(file.metadata.get("general.architecture")).startswith("gemma")


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: Sequence[str]) -> None:
    """Make control and unknown tokens special, and add user-defined tokens, which are never split."""
    types = _read_types(file, tokens)
    is_phi3 = file.metadata.get("general.architecture") == "phi3" and file.metadata[f"{_KEY}model"] == "llama"
    special = [token for token, token_type in zip(tokens, types, strict=True) if token_type in (_CONTROL, _UNKNOWN)]
    strips = {*special} - {*_SPACE_AFTER} if is_phi3 else set[str]()  # they absorb spaces after them; no key says so
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True, rstrip=t in strips) for t in special])
    user_defined = [token for token, index in _vocabulary(file, tokens).items() if types[index] == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_defined])


def _make_post_processor(
    file: GgufFile, bpe_kind: str, special_tokens: Mapping[str, str], tokens: Sequence[str]
) -> processors.PostProcessor | None:
    """The post-processor that adds BOS and EOS to a text as the file asks; None if there is nothing to do."""
    added_by_side = []
    is_llama3 = file.metadata.get(f"{_KEY}pre") in ("llama-bpe", "llama3", "llama-v3")  # their files may lack the key
    adds_bos = bpe_kind == "llama" or (is_llama3 and "bos_token" in special_tokens)
    for side, default in (("bos", adds_bos), ("eos", False)):
        enabled = file.get(f"{_KEY}add_{side}_token", bool, default)
        if enabled and f"{side}_token" not in special_tokens:
            raise UserError(f"{file.path}: {_KEY}add_{side}_token is on, but {_KEY}{side}_token_id is missing")
        added_by_side.append([special_tokens[f"{side}_token"]] if enabled else [])
    bos, eos = added_by_side
    if not bos and not eos:
        return processors.ByteLevel(trim_offsets=False) if bpe_kind == "gpt2" else None
    ids = {token: index for index, token in enumerate(tokens)}
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
        special_tokens=[(token, ids[token]) for token in {*bos, *eos}],
    )


def _token_of_id(file: GgufFile, tokens: Sequence[str], key: str, token_id: int) -> str:
    if not 0 <= token_id < len(tokens):
        raise UserError(f"{file.path}: {_KEY}{key}={token_id} of {len(tokens)} tokens; fetch it again")
    return tokens[token_id]


def _read_types(file: GgufFile, tokens: Sequence[str]) -> Sequence[MetadataValue]:
    types = file.get(f"{_KEY}token_type", list, [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise UserError(
            f"{file.path}: {len(types)} values of {_KEY}token_type for {len(tokens)} tokens; fetch it again"
        )
    return types


def _vocabulary(file: GgufFile, tokens: Sequence[str]) -> dict[str, int]:
    """The vocabulary, without the names [PAD7] by which converters fill the rows of an embedding that no token has."""
    types, in_use = _read_types(file, tokens), {file.metadata.get(f"{_KEY}{key}_token_id") for key in SPECIAL.values()}
    unused_ids = {index for index, token_type in enumerate(types) if token_type in (_USER_DEFINED, _UNUSED)} - in_use
    return {token: index for index, token in enumerate(tokens) if index not in unused_ids or token != f"[PAD{index}]"}

"""An unseen target: its weights are elsewhere, such as on a server. Its tokenizer is here, and maybe its config."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.files import read_mapping
from outrider.draft_models.formats.convert import locate_file
from outrider.draft_models.formats.gguf_config import read_special_ids
from outrider.draft_models.formats.gguf_file import find_gguf, open_gguf
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, GENERATION_FILE
from outrider.draft_models.targets.attention import leave_out_cudnn
from outrider.draft_models.targets.open_target import OpenTarget, load_tokenizer, open_target
from outrider.draft_models.targets.settings import TargetOrTokenizer
from outrider.draft_models.targets.tensor_files import TensorFiles
from outrider.draft_models.targets.vocabulary import limit_rows

_FIELDS = ("vocab_size", "hidden_size", "max_position_embeddings", "rope_parameters", "dtype", "eos_token_id")


@dataclass(frozen=True)
class UnseenTarget(OpenTarget):
    """The tokenizer in `source`, a directory, Hub name or GGUF file, as a target. Nothing else of it is opened.

    `config` has the fields `_FIELDS` only. Without a config the vocabulary is the tokenizer's, the context is
    unlimited, and the hidden size is 1, as a head that predicts acceptance weighs unseen hidden states by 0.
    """

    has_config: bool
    is_seen: ClassVar[bool] = False  # whether the weights can be read

    @cached_property
    def files(self) -> TensorFiles:
        raise UserError(f"tokenizer={self.source}: no weights are read there; give target=, the whole model")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(self.source, self.revision, role="tokenizer")
        return limit_rows(tokenizer, self.config.vocab_size) if self.has_config else tokenizer

    @property
    def vocabulary_size(self) -> int | None:
        return self.config.vocab_size if self.has_config else None

    @cached_property
    def identity(self) -> dict[str, object]:
        """What a drafter is bound to: the vocabulary."""
        return {"vocabulary": self.vocabulary_digest, "weights_seen": False}

    def resize(self, largest_id: int) -> OpenTarget:
        """The target, known to write the token `largest_id`: without a config this id may enlarge its vocabulary."""
        if self.has_config or largest_id < self.config.vocab_size:
            return self
        end_ids = self.config.eos_token_id  # of generation_config.json
        return replace(self, config=_make_config({"vocab_size": largest_id + 1, "eos_token_id": end_ids}))


def open_unseen(source: str, revision: str | None = None) -> OpenTarget:
    """The target with the tokenizer in `source`. This turns cuDNN's attention off in this process, as `open_target`
    does. Raises `UserError` for an unusable tokenizer."""
    leave_out_cudnn()
    config_fields = _read_gguf(path) if (path := find_gguf(source)) is not None else _read_folder(source, revision)
    target = UnseenTarget(source, revision, _make_config(config_fields), has_config="vocab_size" in config_fields)
    return target.resize(max(target.tokenizer.get_vocab().values()))


def open_given(settings: TargetOrTokenizer, *, by_layers: bool = True) -> OpenTarget:
    """The target in a command's options, or its tokenizer, if they have that one. by_layers: it must run by layers."""
    if isinstance(settings, TargetOrTokenizer) and settings.tokenizer is not None:
        return open_unseen(settings.tokenizer, settings.revision)
    return open_target(str(settings.target), settings.revision, by_layers=by_layers)


def _make_config(fields: Mapping[str, object]) -> PreTrainedConfig:
    defaults = {"vocab_size": 0, "hidden_size": 1, "max_position_embeddings": None, "eos_token_id": None}
    return PreTrainedConfig.from_dict({**defaults, **fields})


def _read_folder(source: str, revision: str | None) -> dict[str, object]:
    """The fields `_FIELDS` of config.json and the end tokens of generation_config.json; none without these files."""
    paths = [locate_file(source, revision, name) for name in (CONFIG_FILE, GENERATION_FILE)]
    model, decoding = (read_mapping(path, "description of a model", "fetch it again") if path else {} for path in paths)
    text_fields = nested if isinstance(nested := model.get("text_config"), dict) else model
    with suppress(Exception):  # of an architecture that transformers does not know, or of no file
        config = AutoConfig.from_pretrained(Path(str(paths[0])).parent, trust_remote_code=False).get_text_config()
        text_fields = {name: getattr(config, name, None) for name in _FIELDS}
    all_fields = {**{name: text_fields.get(name) for name in _FIELDS}, **decoding}
    return {name: all_fields[name] for name in _FIELDS if all_fields[name] is not None}


def _read_gguf(path: Path) -> dict[str, object]:
    """The fields `_FIELDS` of a GGUF file, whose tensors are not read."""
    gguf = open_gguf(path)
    arch = gguf.get("general.architecture", str)
    gguf_keys = {"hidden_size": f"{arch}.embedding_length", "max_position_embeddings": f"{arch}.context_length"}
    fields = {name: value for name, key in gguf_keys.items() if (value := gguf.get(key, int, None)) is not None}
    eos_field = {name: value for name, value in read_special_ids(gguf).items() if name in _FIELDS and value is not None}
    return {"vocab_size": len(gguf.texts("tokenizer.ggml.tokens")), **fields, **eos_field}

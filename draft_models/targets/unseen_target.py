"""A target whose weights are elsewhere, such as behind a server: its tokenizer, and its config where there is one."""

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

_READ = ("vocab_size", "hidden_size", "max_position_embeddings", "rope_parameters", "dtype", "eos_token_id")


@dataclass(frozen=True)
class UnseenTarget(OpenTarget):
    """The tokenizer in `source`, a directory, Hub name or GGUF file, as a target. Nothing else of it is opened.

    config: the fields `_READ` of its config. Without a config the vocabulary is the tokenizer's, the context is
    unlimited, and hidden states have one number, since a calibration head of unseen ones weighs them by 0.
    has_config: whether there is a config.
    """

    has_config: bool

    is_seen: ClassVar[bool] = False

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
        """What a drafter for it is bound to: its vocabulary."""
        return {"vocabulary": self.vocabulary_digest, "weights_seen": False}

    def resize(self, largest_id: int) -> OpenTarget:
        if self.has_config or largest_id < self.config.vocab_size:
            return self
        end_ids = self.config.eos_token_id  # of generation_config.json
        return replace(self, config=_make_config({"vocab_size": largest_id + 1, "eos_token_id": end_ids}))


def open_unseen(source: str, revision: str | None = None) -> OpenTarget:
    """The target with the tokenizer in `source`. Raises `UserError` for an unusable tokenizer.

    This turns cuDNN's attention off, as `open_target` does.
    """
    leave_out_cudnn()
    config_fields = _read_gguf(path) if (path := find_gguf(source)) is not None else _read_folder(source, revision)
    target = UnseenTarget(source, revision, _make_config(config_fields), has_config="vocab_size" in config_fields)
    return target.resize(max(target.tokenizer.get_vocab().values()))


def open_given(settings: TargetOrTokenizer, *, by_layers: bool = True) -> OpenTarget:
    """The target in the options of a command, or the tokenizer in its place. by_layers: see `open_target`."""
    if isinstance(settings, TargetOrTokenizer) and settings.tokenizer is not None:
        return open_unseen(settings.tokenizer, settings.revision)
    return open_target(str(settings.target), settings.revision, by_layers=by_layers)


def _make_config(fields: Mapping[str, object]) -> PreTrainedConfig:
    defaults = {"vocab_size": 0, "hidden_size": 1, "max_position_embeddings": None, "eos_token_id": None}
    config: PreTrainedConfig = PreTrainedConfig.from_dict({**defaults, **fields})
    return config


def _read_folder(source: str, revision: str | None) -> dict[str, object]:
    """The fields `_READ` of config.json and the end tokens of generation_config.json; none without these files."""
    paths = [locate_file(source, revision, name) for name in (CONFIG_FILE, GENERATION_FILE)]
    model, decoding = (read_mapping(path, "description of a model", "fetch it again") if path else {} for path in paths)
    text_fields = nested if isinstance(nested := model.get("text_config"), dict) else model
    with suppress(Exception):  # of an architecture that transformers does not know, or of no file
        config = AutoConfig.from_pretrained(Path(str(paths[0])).parent, trust_remote_code=False).get_text_config()
        text_fields = {name: getattr(config, name, None) for name in _READ}
    all_fields = {**{name: text_fields.get(name) for name in _READ}, **decoding}
    return {name: all_fields[name] for name in _READ if all_fields[name] is not None}


def _read_gguf(path: Path) -> dict[str, object]:
    """The same of a GGUF file, whose tensors are not looked at."""
    gguf = open_gguf(path)
    arch = gguf.get("general.architecture", str)
    gguf_keys = {"hidden_size": f"{arch}.embedding_length", "max_position_embeddings": f"{arch}.context_length"}
    fields = {name: value for name, key in gguf_keys.items() if (value := gguf.get(key, int, None)) is not None}
    eos_field = {name: value for name, value in read_special_ids(gguf).items() if name in _READ and value is not None}
    return {"vocab_size": len(gguf.texts("tokenizer.ggml.tokens")), **fields, **eos_field}

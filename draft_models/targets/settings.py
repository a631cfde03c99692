"""Options shared by commands that open a target; light, so that a mistake is reported before torch is imported. `opt`
and `free` (no result depends on it) make fields; `debug` is their value in a rehearsal (see `base.settings`)."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import BeforeValidator

from outrider.base.errors import UserError
from outrider.base.files import is_local
from outrider.base.settings import Named, Positive, Settings, free, missing_error, opt

FloatDtype = Literal["float32", "bfloat16", "float16", "float64"]
Dtype = Literal["auto", FloatDtype]
RunDtype = Literal["auto", "fast", FloatDtype]  # fast: as auto, but bfloat16 on a CPU that has instructions for it
DecodeDtype = Literal["auto", "fast", "int8", FloatDtype]  # int8: weights of 8 bits
# How far two distributions are apart (draft_models/losses.py).
Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance", "kl_tv"]
Dialect = Literal["eagle", "specforge", "speculators", "modelopt"]  # of EAGLE-3 heads (draft_models/eagle3/dialects.py)
WrittenDialect = Literal["specforge", "speculators"]  # those that a training writes
ExportDialect = Literal[WrittenDialect, "gguf"]  # also llama.cpp's, which is not read here


@dataclass(frozen=True)
class InputPath(Named):
    """The metadata of an option: the path of a file or directory that must exist. `what` describes it."""

    hub: bool = False  # whether a Hub name, which is not checked, is accepted too
    besides: tuple[str, ...] = ()  # words that are accepted too
    holds: tuple[str, ...] = ()  # patterns of file names; a directory has a file of one pattern; none: only files
    begins: tuple[bytes, ...] = ()  # the possible first bytes of a file; none: only directories

    def require(self, key: str, value: str) -> None:
        """Raise `UserError` if `value`, of the option `key`, is a local path that does not exist or is no such path."""
        is_exempt = value in self.besides or (self.hub and not is_local(value))
        if not is_exempt and (fault := self._fault(value)):
            raise UserError(f"{key}={value}: {fault}; give {self.what}")

    def _fault(self, path: str) -> str:
        """What is wrong with a path; "" if it suits. Nothing is read of a pipe."""
        if os.path.exists(path) and not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)):
            return "this user may not read it"
        if os.path.isdir(path):
            if any(any(Path(path).glob(pattern)) for pattern in self.holds):
                return ""
            return f"a directory without {' or '.join(self.holds)}" if self.holds else "a directory"
        if not os.path.isfile(path):
            return "" if os.path.exists(path) else "no such directory or file"
        with open(path, "rb") as file:
            magic = file.read(4)  # as many bytes as the longest of `begins`
        return "an empty file" if not magic else "" if magic.startswith(self.begins) else "another kind of file"


def _as_tuple(value: object) -> object:
    """`value` as a tuple if it is a text alone, or the list that JSON has in place of a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


ONE_OR_MORE = BeforeValidator(_as_tuple)  # metadata of a tuple of texts
MODEL = "a Hugging Face model directory, a GGUF file or a Hub name (OWNER/NAME)"
MODEL_FILES, GGUF = ("config.json", "adapter_config.json", "*.gguf"), (b"GGUF",)
Model = Annotated[str, InputPath(MODEL, hub=True, holds=MODEL_FILES, begins=GGUF)]
TOKENIZER = "a SentencePiece .model file, a GGUF file, or a tokenizer's directory or Hub name (OWNER/NAME)"
TOKENIZER_FILES, PROTOBUF = ("*.json", "*.model", "*.gguf"), b"\n"  # the first byte of a SentencePiece file
Tokenizer = Annotated[str, InputPath(TOKENIZER, hub=True, holds=TOKENIZER_FILES, begins=(*GGUF, PROTOBUF))]
_OF_TARGET = "the directory or Hub name of the target's tokenizer, or its GGUF file"
TargetTokenizer = Annotated[str, InputPath(_OF_TARGET, hub=True, holds=("*.json", "*.gguf"), begins=GGUF)]
Head = Annotated[str, InputPath("a directory or Hub name of a draft head", hub=True, holds=("config.json",))]
DrafterFolder = Annotated[str, InputPath("the directory of a drafter", holds=("*.json", "*.safetensors"))]
_TABLE = "the directory of an n-gram table (outrider build-trigrams)"
TableFolder = Annotated[str, InputPath(_TABLE, holds=("table.safetensors",))]
_ANY = "the directory of a drafter, or the Hub name of a draft head"
AnyDrafter = Annotated[str, InputPath(_ANY, hub=True, holds=("*.json", "*.safetensors", "*.gguf"), begins=GGUF)]
_PYTHON = "the directory of an environment with the engine, or its Python"
EnginePython = Annotated[str, InputPath(_PYTHON, holds=("bin/python",), begins=(b"",))]  # any content
# The names of the kinds of drafters and of their options, and of the folders that `save_tiny_models` writes.
TARGET, SMALL_LM, EARLY_EXIT, EAGLE3, TABLE = "target", "small_lm", "early_exit", "eagle3", "table"
MTP, DFLASH = "mtp", "dflash"
_WITH_MTP = "target, if it has an MTP head, or a model directory, GGUF file or Hub name with one"
MtpSource = Annotated[str, InputPath(_WITH_MTP, hub=True, besides=(TARGET,), holds=MODEL_FILES, begins=GGUF)]
_START = "a directory or Hub name of an EAGLE-3 head or of a model with an MTP head; or target, if it has one"
HeadStart = Annotated[str, InputPath(_START, hub=True, besides=(TARGET,), holds=("config.json",), begins=GGUF)]
HEAD_FOLDER = "calibration"  # folder of a calibration head (predicts acceptance) in a directory that other engines read


@dataclass(frozen=True)
class TinyModel:
    """The mark of an option that names a model: a rehearsal takes a tiny random model (see `save_tiny_models`)."""

    name: str  # the folder of the tiny model
    any_kind: bool = False  # whether the folder may be of any kind of drafter
    # Values of the other options if a rehearsal leaves the model out, as a step of a pipeline may do without it.
    without: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rehearsed(Settings):
    """A command that can be rehearsed (see `inference.loading.rehearsal`)."""

    debug: bool = free(False)
    """a rehearsal in <out_dir>-debug: it checks the target, data and prompts on the command line, then runs everything
    on tiny random models and little data"""


@dataclass(frozen=True, kw_only=True)
class TargetOrTokenizer(Settings):
    """A command for which the target's weights may be elsewhere (see `draft_models.targets.unseen_target`)."""

    target: Model | None = free(None, "model directory, GGUF file or Hub name", debug=TinyModel(TARGET))
    tokenizer: TargetTokenizer | None = free(None, debug=TinyModel(TARGET))
    """instead of target, whose weights are elsewhere: a directory, Hub name or GGUF file, of which only the tokenizer
    is read, and its config where there is one"""
    revision: str | None = free(None, "of the target on the Hub: branch, tag or commit", debug=None)

    def check_fields(self) -> None:  # `Settings` runs the bases' checks too
        self.require("tokenizer", self.target is None or self.tokenizer is None, "null with target=, which has one")

    def require_one(self) -> None:
        """Raise `UserError` if neither of the two is given."""
        if self.target is None and self.tokenizer is None:
            raise missing_error("target", f"{MODEL}; or tokenizer=, where its weights are elsewhere")


@dataclass(frozen=True, kw_only=True)
class ReadingChanges(Settings):
    """Corrections of how a draft head is read: EAGLE-3, MTP, DFlash, DSpark; null: as its files say. An option that a
    kind of head does not have is refused."""

    taps: tuple[Annotated[int, Ge(0)], ...] | None = None
    """boundaries of the target's layers, e.g. [2,16,29]: 0 is the embedding, i the output of layer i − 1"""
    rope: Literal["plain", "target"] | None = None
    """plain: every dimension rotates, positions as they are; target: the rope of the target"""
    rope_theta: Positive | None = opt(None, "its base")
    norm_before_residual: bool | None = opt(None, "the first layer adds to the normed feature")
    norm_output: bool | None = opt(None, "the next step gets the output of the final norm")
    tap_norms: bool | None = opt(None, 'each aux hidden state is normed ("fc_norm")')
    joint_norm: bool | None = opt(None, 'their concatenation is normed ("norm_before_fc")')
    embedding_norm: bool | None = opt(None, "the token's embedding is normed")
    final_norm: bool | None = opt(None, "there is a norm before the logits")
    head_norms: bool | None = opt(None, "queries and keys are normed head by head (Qwen3)")
    draft_ids: Literal["offset", "index"] | None = opt(None, "what d2t holds: id − index, or the id")
    own_embedding: bool | None = opt(None, "false: the target's embedding, whatever the head's file has")
    own_head: bool | None = opt(None, "false: the target's head")
    hidden_first: bool | None = opt(None, "MTP: fc reads [hidden state; embedding]; false: [embedding; hidden state]")
    target_norm: bool | None = opt(None, "MTP: the target's final norm is applied to its hidden state")
    norm_offset: bool | None = opt(None, "MTP: norms multiply by 1 + their weight")
    causal: bool | None = opt(None, "DFlash, DSpark: rows of a block see no later rows of it")
    sample_from_anchor: bool | None = None
    """DFlash, DSpark: rows predict the token after their position, so that the first row drafts too"""
    neox: bool | None = opt(None, "DFlash, DSpark: dimension i rotates with i + D/2; false: with its neighbour")

    @property
    def overrides(self) -> dict[str, Any]:
        """The options that are not null, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        """The options as a user gives them: "reading.taps=[2,4,5]"."""
        return " ".join(f"reading.{name}={_option_text(value)}" for name, value in self.overrides.items())


def _option_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if value < 1e6 else str(int(value))  # 1000000, not 1e+06
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)

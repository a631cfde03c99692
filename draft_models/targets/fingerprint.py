"""What a drafter belongs to: a target, known by its config, its tokenizer and digests of its tensors."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from draft_models.targets.empty_models import anatomy
from draft_models.targets.model_identity import model_differences, model_identity
from draft_models.targets.tensor_files import TensorFiles
from outrider.errors import UserError
from outrider.settings import listed


@dataclass(frozen=True)
class Fingerprint:
    """What a drafter belongs to. All fields but `target` and `revision` must match to load it.

    weights: digest of a few rows of the first and the last layer. tokenizer, chat_template: digests. config: what
    config.json says that decides numbers. tensors: digests of a sample of every tensor, by part of the model (see
    `TensorFiles.digests`), without the parts that were not on the machine. Earlier versions recorded neither config nor
    tensors.
    """

    target: str
    revision: str | None
    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    weights: str
    tokenizer: str
    chat_template: str | None
    config: dict[str, Any] | None = None
    tensors: dict[str, str] | None = None

    def differences(self, other: "Fingerprint") -> list[str]:
        """In words, every field in which the target `other` is not the drafter's; where it lies is none of them."""
        plain = ("target", "revision", "config", "tensors")
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        found = [(k, mine[k], theirs[k]) for k in mine if k not in plain and mine[k] != theirs[k]]
        words = [f"{key}: drafter {a!r}, target {b!r}" for key, a, b in found]
        return words + model_differences(mine, theirs)

    def unchecked(self, other: "Fingerprint") -> list[str]:
        """In words, what `differences` could not compare, as it was not recorded."""
        missing = [] if self.config is not None else ["the config, but for sizes"]
        if self.tensors is None:
            return [*missing, "the weights, but for a few rows"]
        parts = sorted((other.tensors or {}).keys() - self.tensors.keys())
        return [*missing, *([f"the weights in {listed(parts)}"] if parts else [])]


def _sampled(files: TensorFiles, config: PreTrainedConfig) -> list[str]:
    """The tensors outside the layers and of the first and the last one; all of a model without known layers."""
    try:
        wanted = anatomy(config).prefixes((0, config.num_hidden_layers - 1))
    except UserError:
        return list(files.file_of)
    return [name for name in files.file_of if name.startswith(wanted)]


def fingerprint_target(
    files: TensorFiles, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, fetch: bool = True
) -> Fingerprint:
    """The fingerprint of a target. It reads a few MB, and fetches what is not here yet, unless `fetch` is off."""
    names = _sampled(files, config)
    template = tokenizer.chat_template
    return Fingerprint(
        target=files.source,
        revision=files.revision,
        architecture=config.model_type,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        weights=files.digest(names),
        tokenizer=tokenizer_digest(tokenizer)[:16],
        chat_template=None if template is None else _digest(json.dumps(template, sort_keys=True).encode()),
        **model_identity(files, fetch=fetch),
    )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over all that decides how plain text becomes ids: vocabulary, merges and rules, special tokens."""
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend.pop("truncation", None)  # left behind by the last call, not a property of the tokenizer
        backend.pop("padding", None)
    else:
        backend = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    parts = [backend, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]

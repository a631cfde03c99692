"""Overrides of an EAGLE-3 head's config.json. Settings only: torch is not imported."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge

from outrider.settings import Positive, Settings


@dataclass(frozen=True, kw_only=True)
class ReadingChanges(Settings):
    """Corrections of an EAGLE-3 head's config.json; null: as it says."""

    # boundaries of the target's layers, e.g. [2,16,29]: 0 is the embedding, i the output of layer i − 1
    taps: tuple[Annotated[int, Ge(0)], ...] | None = None
    # plain: every dimension rotates, positions as they are; target: the rope of the target
    rope: Literal["plain", "target"] | None = None
    rope_theta: Positive | None = None  # its base
    norm_before_residual: bool | None = None  # the first layer adds to the normed feature
    norm_output: bool | None = None  # the next step is given what the final norm gives
    tap_norms: bool | None = None  # each tap is normed ("fc_norm")
    joint_norm: bool | None = None  # all taps together are ("norm_before_fc")
    embedding_norm: bool | None = None  # the token's embedding is
    final_norm: bool | None = None  # there is a norm before the logits
    head_norms: bool | None = None  # queries and keys are normed head by head (Qwen3)
    draft_ids: Literal["offset", "index"] | None = None  # what d2t holds
    own_embedding: bool | None = None  # false: the target's embedding, whatever the head's file has
    own_head: bool | None = None  # false: the target's head

    def stated(self) -> dict[str, Any]:
        """The overrides that are not null."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        """The options as a user gives them: "reading.taps=[2,4,5]"."""
        return " ".join(f"reading.{name}={_shown(value)}" for name, value in self.stated().items())


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if value < 1e6 else str(int(value))
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)

"""What shows of an EAGLE-3 head without a pass: its maps, its embedding and head beside the target's, its limits."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from draft_models.eagle3.checkpoint import D2T, StoredHead
from draft_models.eagle3.model import Eagle3
from draft_models.targets.anatomy import context_limit
from draft_models.targets.open_target import OpenTarget
from inference.doctor.patient import Fact, numbers
from inference.doctor.training_data import made_for

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
ROWS = 4096  # of such matrices that are compared at a time, as it is done in float32


def facts_of(
    stored: StoredHead,
    record: Mapping[str, object],
    head: Eagle3,
    tensors: Mapping[str, Tensor],
    target: OpenTarget,
    embedding: Tensor,
    output: Tensor,
) -> list[Fact]:
    """All of them. record: what a training here left of it.

    embedding, output: the target's [V, H_t].
    """
    return [
        Fact("written", f"{'here' if stored.made_here else 'elsewhere'}, in the dialect of {stored.dialect}"),
        *([made_for(record, target)] if record else _named(stored, target)),
        numbers(stored.config.get("dtype") or stored.config.get("torch_dtype"), head.dtype),
        *_vocabulary(stored, tensors),
        _likeness("embedding", tensors.get(EMBEDDING), embedding, None),
        _likeness("head", tensors.get(HEAD), output, head.draft_tokens),
        *_positions(stored, target),
    ]


def _named(stored: StoredHead, target: OpenTarget) -> Iterator[Fact]:
    match stored.config.get("speculators_config"):
        case {"verifier": {"name_or_path": name}} if name:
            yield Fact("made for", f"{name}; this target: {target.source}. A fine-tuned or quantised one agrees less")


def _vocabulary(stored: StoredHead, tensors: Mapping[str, Tensor]) -> Iterator[Fact]:
    reading = stored.reading
    some = reading.draft_vocabulary < reading.vocabulary
    yield Fact("draft vocabulary", f"{reading.draft_vocabulary} of {reading.vocabulary} tokens")
    if some and reading.draft_ids == "offset" and not tensors[D2T].any():
        first = f"the first {reading.draft_vocabulary} ids"
        yield Fact("d2t", f"all zero, so that its tokens are {first}: it was never put in", True)


def _likeness(what: str, own: Tensor | None, theirs: Tensor, tokens: Tensor | None) -> Fact:
    """Whether a matrix in the head's file [k, H] is the target's [V, H], of which it has the rows `tokens`."""
    if own is None:
        return Fact(what, "none in its file: the target's")
    rows = theirs if tokens is None else theirs[tokens]
    if own.shape != rows.shape:
        return Fact(what, "its own, of another width than the target's")
    pairs = list(zip(own.split(ROWS), rows.split(ROWS), strict=True))
    same = torch.cat([(ours == other.to(ours.dtype)).all(-1) for ours, other in pairs]).double().mean().item()
    cosines = [torch.cosine_similarity(ours.float(), other.float(), dim=-1) for ours, other in pairs]
    likeness = torch.cat(cosines).mean().item()
    return Fact(what, f"its own; {same:.0%} of the rows are the target's, mean cosine {likeness:.2f}")


def _positions(stored: StoredHead, target: OpenTarget) -> Iterator[Fact]:
    limit, context = stored.reading.max_positions, context_limit(target.config)
    if limit < context:
        what = f"max_position_embeddings={limit}, below the target's {context}"
        yield Fact("positions", f"{what}: servers draft no further; this runtime does", True)

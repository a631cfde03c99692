"""Variants of reading an EAGLE-3 head that change one thing of the declared reading, each for a known mistake."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from draft_models.eagle3.checkpoint import D2T, TRAINING_FILE, StoredHead, fit_tensors, make_head, open_head
from draft_models.eagle3.model import Eagle3
from draft_models.eagle3.reading import Reading, changed, require_target
from draft_models.targets.model_spec import context_limit
from draft_models.targets.open_target import OpenTarget
from draft_models.targets.settings import ReadingChanges
from draft_models.targets.stack import LayerStack
from draft_models.targets.target import Target, require_layers
from inference.doctor.drafting import draft_by_head
from inference.doctor.examinee import Examinee, Fact, Variant, numbers
from inference.doctor.training_data import made_for, recorded_settings
from inference.drafters.eagle3 import Eagle3Plugin
from inference.drafters.shaped import Calibrated, bare
from inference.settings.kinds import read_record
from outrider.errors import UserError

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


OLD_THETA = 10000.0  # EAGLE trains with this value, whatever its config says


class Neighbour(NamedTuple):
    """Another way to read a head: its name, the changed fields, and the head's fault if this way is better."""

    name: str
    changes: ReadingChanges
    meaning: str


_TAPS = "its config.json counts the target's layers in another way, or names those of another target"
_ROPE = "its training had another rotary embedding than its config.json describes"
_SWITCHES = {  # boolean fields of `Reading`: what each normalises, and when
    "norm_before_residual": ("residual stream of its first layer", "begins with the normed feature"),
    "norm_output": ("its own output", "is normed before it is fed back"),
    "tap_norms": ("taps", "are normed one by one"),
    "joint_norm": ("taps", "are normed together"),
    "embedding_norm": ("token's embedding", "is normed"),
    "final_norm": ("output", "is normed before the logits"),
    "head_norms": ("queries and keys", "are normed"),
}
_STILL = (
    "it was trained with drafted tokens at the position of the token before them; train it again, with positions that "
    "move on"
)


def examine_head(
    plugin: Eagle3Plugin, model: Eagle3 | Calibrated[Eagle3], where: str, target: OpenTarget, stack: Target
) -> Examinee:
    """The `Examinee` of an EAGLE-3 head that is prepared to draft for `stack`."""
    head: Eagle3 = bare(model)
    layered, own = require_layers(stack), head.shared_embedding
    embedding = own[0] if own else layered.embed_tokens.weight
    return examinee_of(open_head(where, target.config, changes=plugin.changes), target, layered, embedding)


def examinee_of(stored: StoredHead, target: OpenTarget, stack: LayerStack, embedding: Tensor) -> Examinee:
    """The `Examinee` of the head `stored` for the target `stack`. Its weights are read once for all variants.

    embedding: the target's [V, H_t].
    """
    tensors = stored.tensors(stack.dtype, stack.device)
    output = stack.head.weight

    def make(reading: Reading) -> Eagle3:
        require_target(reading, target.config, stored.source)
        head = make_head(reading, fit_tensors(reading, tensors, stored.source), stored.source)
        if not reading.own_embedding:
            head.use_embedding(embedding)
        if not reading.own_head:
            head.use_head(output)
        return head

    declared = make(stored.reading)
    variants, seen = [], [stored.reading]
    for name, changes, meaning in neighbours(stored.reading, tensors, target):
        try:
            reading = changed(stored.reading, changes, target.config)
            if reading in seen:
                continue
            head = make(reading)
        except UserError:  # the stored tensors do not fit such a head
            continue
        seen.append(reading)
        variants.append(Variant(name, partial(draft_by_head, head), str(changes), meaning, reading.taps))
    taps, still = stored.reading.taps, partial(draft_by_head, declared, still=True)
    variants.append(Variant("drafted positions stand still", still, "", _STILL, taps))
    record = read_record(stored.source, TRAINING_FILE)
    return Examinee(
        Variant("as declared", partial(draft_by_head, declared), boundaries=taps),
        variants,
        known_tokens=None if declared.draft_tokens is None else declared.draft_tokens.tolist(),
        facts=facts_of(stored, record, declared, tensors, target, embedding, output),
        data=recorded_settings(record).get("data"),
    )


def neighbours(reading: Reading, tensors: Mapping[str, Tensor], target: OpenTarget) -> Iterator[Neighbour]:
    """The variants to try; some may be impossible, or equal to the declared reading."""
    layers = target.config.num_hidden_layers
    later, earlier = (tuple(tap + step for tap in reading.taps) for step in (1, -1))
    yield Neighbour(f"taps a layer later {list(later)}", ReadingChanges(taps=later), _TAPS)
    if earlier[0] >= 0:
        yield Neighbour(f"taps a layer earlier {list(earlier)}", ReadingChanges(taps=earlier), _TAPS)
    usual = (2, layers // 2, layers - 3)
    if len(reading.taps) == 3 and layers >= 7:
        yield Neighbour(f"EAGLE's usual taps {list(usual)}", ReadingChanges(taps=usual), _TAPS)
    yield from _ropes(target)
    for name, (what, said) in _SWITCHES.items():
        on = not getattr(reading, name)
        switch: dict[str, Any] = {name: on}
        changes = ReadingChanges(**switch)
        meaning = f"{what} {said if on else said.replace('is', 'is not').replace('are', 'are not')}"
        yield Neighbour(f"{name} {'on' if on else 'off'}", changes, meaning)
    if D2T in tensors and reading.draft_vocabulary < reading.vocabulary:
        other: Literal["index", "offset"] = "index" if reading.draft_ids == "offset" else "offset"
        meaning = f"its d2t holds the {'ids of tokens' if other == 'index' else 'offsets of ids'}"
        yield Neighbour(f"d2t as {other}", ReadingChanges(draft_ids=other), meaning)
    said = "was not the one in its file, which is random, another model's or overwritten"
    yield Neighbour("target's embedding", ReadingChanges(own_embedding=False), f"in training its embedding {said}")
    yield Neighbour("target's head", ReadingChanges(own_head=False), f"in training its head {said}")


def _ropes(target: OpenTarget) -> Iterator[Neighbour]:
    rope = getattr(target.config, "rope_parameters", None) or {}
    yield Neighbour("the target's rope", ReadingChanges(rope="target"), _ROPE)
    yield Neighbour("a plain rope", ReadingChanges(rope="plain"), _ROPE)
    for theta in (OLD_THETA, rope.get("rope_theta")):
        if isinstance(theta, int | float) and theta > 0:
            yield Neighbour(f"rope_theta {theta:g}", ReadingChanges(rope_theta=float(theta)), _ROPE)
            both = ReadingChanges(rope="plain", rope_theta=float(theta))
            yield Neighbour(f"a plain rope of rope_theta {theta:g}", both, _ROPE)

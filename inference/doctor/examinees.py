"""The drafters that the doctor examines: how each checkpoint may be read, its drafts along a text, and recorded facts.

A reading is what a checkpoint's config declares about its weights, such as the taps, the boundaries of the target's
layers whose hidden states it reads (b: the input of layer b). Each variant changes one thing of the declared reading,
for a known mistake. A recording is a text of the target with its hidden states; positions from `start` on are judged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.settings import construct
from outrider.draft_models.dflash.blocks import run_blocks
from outrider.draft_models.dflash.checkpoint import open_drafter
from outrider.draft_models.dflash.dialects import CONFIDENCE
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.eagle3.checkpoint import open_head
from outrider.draft_models.eagle3.model import Eagle3, Steps
from outrider.draft_models.early_exit.model import EarlyExit
from outrider.draft_models.heads import sizes
from outrider.draft_models.heads.files import D2T, StoredDrafter
from outrider.draft_models.heads.layers import DraftHead
from outrider.draft_models.mtp.checkpoint import open_mtp
from outrider.draft_models.small_lm import pard2
from outrider.draft_models.small_lm.model import TRAINING_FILE as LM_TRAINING_FILE
from outrider.draft_models.small_lm.model import SmallLM, last_id
from outrider.draft_models.targets.fingerprint import Fingerprint
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.draft_models.targets.stack import require_layers
from outrider.draft_models.targets.target import Band, Target
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.doctor.scores import Fact, Recording, read_states
from outrider.inference.drafters.model_plugin import without_calibration
from outrider.inference.drafters.plugin import read_record
from outrider.inference.settings.kinds import DFLASH, EAGLE3, EARLY_EXIT, MTP, SMALL_LM

DECLARED = "as declared"
BLOCK_STEPS = 4  # tokens of the draft of a block drafter, which drafts several tokens in one pass, that are judged
STEPS = 2  # draft steps of a head: the first reads true features, the second also one of the head's own outputs
_FAULTS = {  # by the changed field of a reading: what is wrong with the head, where the option does not say it
    "taps": "its config.json counts the target's layers in another way",
    "own_embedding": "trained without the embedding in its file, which is random, another model's or overwritten",
    "own_head": "trained without the head in its file, which is random, another model's or overwritten",
    "hidden_first": "its fc reads embedding and hidden state in the other order, as another family's does",
    "target_norm": "its trainer took the target's hidden state at the other side of the final norm",
    "norm_output": "its trainer fed its output back at the other side of its norm",
    "norm_offset": "its norms are stored the other way: as factors, or as factors minus 1",
}
_UNLIKE = "it was trained so, unlike what its config.json says"
_MEND = "its config.json says otherwise than it was trained: correct this key"
_UNREADABLE = "it was trained so, and Outrider cannot draft so: train it again, as AMD-AGI/PARD does"
_LEFT_OUT = "methods.NAME.target_states=false"
PARD2_SCALES = (0.01, 0.02, 1.0)  # factors of the projected states: a training's default, a decoding's, and none
_STILL = "it was trained with drafted tokens at the position of the token before them: train it again, as they move on"


class Variant(NamedTuple):
    """A variant of reading a drafter's checkpoint.

    name: how it differs from the declared reading. option: selects it, "": none does. meaning: what is wrong with the
    drafter if it is better. draft: the logits [steps, positions, V] on a recording; in step s the last s tokens before
    a position were drafted, correctly. boundaries: where it needs the target's hidden states.
    """

    name: str
    draft: Callable[[Recording], Tensor]
    boundaries: tuple[int, ...] = ()
    option: str = ""
    meaning: str = ""


class Examinee(NamedTuple):
    """A drafter to examine. variants: the reading that its config declares, then others with one difference each."""

    variants: Sequence[Variant]
    facts: Sequence[Fact] = ()


@torch.inference_mode()
def draft_by_head(head: Eagle3, recording: Recording, *, still: bool = False) -> Tensor:
    """Logits [2, positions, V] of a head: of the first draft step, and of the second one after a correct token.

    The steps are those of training: step s reads all tokens shifted by s, and the outputs of step s − 1 (see `Steps`).
    still: drafted tokens keep the position of the token before them, as in trainings that do not advance the position.
    """
    tokens, start, cache = recording.tokens, recording.start, Steps()
    count = len(tokens) - 1
    positions = torch.arange(count, device=tokens.device)
    aux = torch.cat([recording.aux_hidden[boundary] for boundary in head.reading.taps], dim=-1)[:, :count]
    hidden, step_outputs = head.features(aux.to(head.dtype)), []
    head.reserve(count + STEPS)
    embedding = head.embed(tokens[None])
    for step in range(STEPS):
        cache.step, position_shift = step, 0 if still else step  # how far a query is ahead of its row's keys
        masks = {window: Band.sliding(positions, (window or count + STEPS) - position_shift) for window in head.windows}
        cache.tokens[step] = (positions[None] + 1 + step) % len(tokens)  # the last `step` ones are not judged
        hidden = head.run(embedding, hidden, masks, head.rotary(positions[None] + position_shift), cache)
        step_outputs.append(hidden[0, start - 2 - step : count - 1 - step])
    return head.logits(torch.stack(step_outputs))


@torch.inference_mode()
def draft_by_block(drafter: DFlash, recording: Recording) -> Tensor:
    """Logits [steps, positions, V] of a block drafter: the tokens of its draft at a depth of up to `BLOCK_STEPS`."""
    tokens, start, step_count = recording.tokens, recording.start, min(BLOCK_STEPS, drafter.reading.block - 1)
    # The token of step s at a position is drafted by the block that begins s + 1 positions before.
    aux = torch.cat([recording.aux_hidden[boundary] for boundary in drafter.reading.taps], dim=-1)
    anchors = torch.arange(start - step_count, len(tokens) - 1, device=tokens.device)  # [A], first rows of blocks
    hidden = run_blocks(drafter, aux.to(drafter.dtype), anchors, tokens[anchors])
    draft_rows = hidden[:, 0 if drafter.reading.sample_from_anchor else 1 :]
    count, depths = len(tokens) - start, range(step_count)
    logits = torch.stack([drafter.draft_logits(draft_rows[step_count - 1 - step :][:count, step]) for step in depths])
    # bias: of the Markov head, by the token before; spread: from the draft vocabulary to the target's
    return drafter.spread(drafter.bias(logits, tokens[start - 1 : -1].expand(step_count, -1)))


def compare_training_target(record: Mapping[str, object], target: OpenTarget) -> Fact:
    """Whether the target is the one that the drafter was trained on, as far as `record`, which may be empty, tells."""
    target_name, settings = record.get("target", "a target not said"), record.get("settings")
    try:
        trained_target = construct(Fingerprint, settings.get("target") if isinstance(settings, dict) else None)
    except UserError:
        return Fact("made for", f"{target_name}, whose weights were not recorded")
    differences = trained_target.differences(target.fingerprint)
    relation = f"not this target ({'; '.join(differences)})" if differences else "whose digests are this target's"
    return Fact("made for", f"{target_name}, {relation}", suspect=bool(differences))


def examine_exit(model: EarlyExit, path: str, target: OpenTarget, stack: Target, changes: ReadingChanges) -> Examinee:
    """An early exit that is prepared to decode on `stack`. Loading has checked that it was trained on this target."""
    drafter, layer_stack = without_calibration(model), require_layers(stack)

    @torch.inference_mode()
    def draft(recording: Recording) -> Tensor:
        hidden = recording.aux_hidden[drafter.exit_layer]
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        mask = None if drafter.window is None else Band.sliding(positions, drafter.window)
        out = drafter.run(hidden, mask, layer_stack.rotary(positions[None]))
        return drafter.logits(out[:, recording.start - 1 : -1])

    return Examinee([Variant(DECLARED, draft, (drafter.exit_layer,))])


def examine_lm(model: SmallLM, path: str, target: OpenTarget, stack: Target, changes: ReadingChanges) -> Examinee:
    """A small LM, and if it is a PARD-2 model, the variants of its projection of the target's hidden states."""
    lm = cast("SmallLM", without_calibration(model))

    def draft(recording: Recording) -> Tensor:  # over its own vocabulary, which may be smaller than the target's
        return read_states(lm, recording.tokens.clamp(max=last_id(lm)), recording.start - 1)[0][None, :-1]

    variants = [Variant(DECLARED, draft)]
    if isinstance(lm, pard2.Pard2):
        lm_alone = Variant(_LEFT_OUT, draft, option=_LEFT_OUT, meaning="these hidden states do not help it")
        variants = [*_pard2_variants(lm, path, target, stack), lm_alone]
    return Examinee(variants, [compare_training_target(read_record(path, LM_TRAINING_FILE), target)])


@torch.inference_mode()
def draft_by_states(lm: pard2.Pard2, projection: pard2.TargetProjection, delay: int, recording: Recording) -> Tensor:
    """Logits [1, positions, V] of the first draft step of PARD-2, a small LM that reads hidden states of the target.

    delay: positions from the states to the token that they are added to.
    """
    tokens = recording.tokens.clamp(max=last_id(lm))
    positions = torch.arange(len(tokens), device=tokens.device)
    aux = torch.cat([recording.aux_hidden[boundary] for boundary in projection.boundaries], dim=-1)
    joined_states = projection.join_states(aux, lm.target_norm[0])  # a list, so that the norm is no submodule
    delayed_states = F.pad(joined_states, (0, 0, delay, 0))[:, : len(tokens)]  # [1, n, k · H_t]
    masks = {window: None if window is None else Band.sliding(positions, window) for window in lm.windows}
    lm.reserve(len(tokens))
    x = lm.embed(tokens[None], positions[None]) + projection(delayed_states)  # [1, n, d]
    hidden = lm.run(x, 0, len(lm.layers), lm.rotary(positions[None]), masks)
    return lm.logits(hidden[:, recording.start - 1 : -1])


def _pard2_variants(lm: pard2.Pard2, path: str, target: OpenTarget, stack: Target) -> Iterator[Variant]:
    declared = pard2.projection_config(lm.config)
    assert declared is not None  # or it had no projection
    tensors = pard2.read_projection(open_tensors(path), declared, lm.config.hidden_size, stack.dtype, stack.device)

    def make(
        name: str, meaning: str = "", config: pard2.ProjectionConfig = declared, *, delay: int = 1, normed: bool = True
    ) -> Variant:
        projection = pard2.TargetProjection(config, tensors, target.config)
        projection.normed &= normed
        return Variant(name, partial(draft_by_states, lm, projection, delay), projection.boundaries, meaning=meaning)

    yield make(DECLARED)
    boundaries = declared.boundaries(target.config) or ()
    layer_choices = (*(tuple(boundary + step for boundary in boundaries) for step in (-1, 1)), boundaries[::-1])
    for target_layers in layer_choices:
        config = replace(declared, pard2_target_layers=target_layers)
        if target_layers != boundaries and min(target_layers) >= 0 and config.boundaries(target.config) is not None:
            yield make(f"pard2_target_layers={[*target_layers]}", _MEND, config)
    for scale in PARD2_SCALES:
        if scale != declared.pard2_scale:
            yield make(f"pard2_scale={scale}", _MEND, replace(declared, pard2_scale=scale))
    if target.config.num_hidden_layers in boundaries:
        yield make("states before the final norm", _UNREADABLE, normed=False)
    for delay in (0, 2):
        yield make(f"states {delay} positions before", _UNREADABLE, delay=delay)


def examine_head(
    _: object,
    path: str,
    target: OpenTarget,
    stack: Target,
    changes: ReadingChanges,
    open_stored: Callable[..., StoredDrafter[DraftHead]] = open_head,
    draft: Callable[..., Tensor] = draft_by_head,
) -> Examinee:
    """A draft head for `stack`. Its weights are read once for all variants.

    changes: those with which it is read now; they count as declared. open_stored, draft: of this kind of head.
    """
    stored_head, layer_stack = open_stored(path, target.config, changes), require_layers(stack)
    tensors, declared = stored_head.tensors(stack.dtype, stack.device), stored_head.reading

    def make(reading: sizes.HeadSizes) -> DraftHead:
        sizes.require_fitting_target(reading, target.config, stored_head.where)
        head = stored_head.make(reading, tensors)
        head.use_target(layer_stack)
        return head

    variants, seen_readings = [Variant(DECLARED, partial(draft, make(declared)), declared.taps)], [declared]
    for change in _neighbours(declared, target):
        try:
            reading = sizes.apply_changes(declared, change, target.config)
            if reading in seen_readings:
                continue
            variant_draft = partial(draft, make(reading))
        except UserError:  # the stored tensors do not fit such a head
            continue
        seen_readings.append(reading)
        option, meaning = str(change), _FAULTS.get(next(iter(change.overrides)), _UNLIKE)
        variants.append(Variant(option, variant_draft, reading.taps, option, meaning))
    if draft is draft_by_head:  # a block drafter drafts all tokens in one pass
        still_draft = partial(draft, make(declared), still=True)
        variants.append(Variant("drafted positions stand still", still_draft, declared.taps, meaning=_STILL))
    return Examinee(variants, list(_head_facts(stored_head, tensors, target)))


def _head_facts(stored: StoredDrafter[DraftHead], tensors: Mapping[str, Tensor], target: OpenTarget) -> Iterator[Fact]:
    reading, record = stored.reading, read_record(stored.source, stored.record)
    yield Fact("written", f"{'here' if stored.made_here else 'elsewhere'}, in the dialect of {stored.dialect}")
    match stored.config.get("speculators_config"):
        case _ if record:  # whatever the config says
            yield compare_training_target(record, target)
        case {"verifier": {"name_or_path": name}} if name:
            yield Fact("made for", f"{name}; this target: {target.source}. A fine-tuned or quantised one agrees less")
    draft_size = reading.draft_vocabulary
    if draft_size < reading.vocabulary and reading.draft_ids == "offset" and not tensors[D2T].any():
        yield Fact("d2t", f"all zero: its tokens are the first {draft_size}, as it was never put in", suspect=True)
    if stored.config.get("enable_confidence_head") and CONFIDENCE not in tensors:
        yield Fact("confidence head", "declared, but its tensors are not in the file", suspect=True)
    limit, context = reading.max_positions, context_limit(target.config)
    if limit < context:  # True: suspect, as above
        yield Fact("positions", f"max_position_embeddings={limit}, the target's {context}: servers stop there", True)


def _neighbours(reading: sizes.HeadSizes, target: OpenTarget) -> Iterator[ReadingChanges]:
    """The changes to try, one at a time; some may be impossible, or equal to the declared reading."""
    shifted_taps = (tuple(tap + step for tap in reading.taps) for step in (1, -1))
    default_taps = sizes.default_aux_layers(target.config.num_hidden_layers)
    yield from (ReadingChanges(taps=taps) for taps in (*shifted_taps, default_taps) if taps[0] >= 0)
    yield ReadingChanges(rope="target")
    for theta in (None, 10000.0, sizes.rope_base(target.config)):  # EAGLE trains with 10000, whatever its config says
        yield from (ReadingChanges(rope_theta=theta), ReadingChanges(rope="plain", rope_theta=theta))
    for field in fields(ReadingChanges):
        declared_value = getattr(reading, field.name, None)
        if isinstance(declared_value, bool):
            yield construct(ReadingChanges, {field.name: not declared_value})
    yield from (ReadingChanges(causal=causal) for causal in (True, False))
    yield ReadingChanges(draft_ids="index" if reading.draft_ids == "offset" else "offset")


# By kind: (`prepare`d model, the model's path, target, stack, changes of a reading) → its `Examinee`.
EXAMINERS: dict[str, Callable[..., Examinee]] = {
    EARLY_EXIT.name: examine_exit,
    SMALL_LM.name: examine_lm,
    EAGLE3.name: examine_head,
    MTP.name: partial(examine_head, open_stored=open_mtp),
    DFLASH.name: partial(examine_head, open_stored=open_drafter, draft=draft_by_block),
}

"""The drafters that the doctor examines: how each checkpoint may be read, its drafts along a text, and recorded facts.

Each variant of an EAGLE-3 head's reading changes one thing of the declared reading, for a known mistake.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from outrider.base.errors import UserError
from outrider.base.settings import construct
from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.records import Counts
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.eagle3.checkpoint import D2T, StoredHead, fit_tensors, make_head, open_head
from outrider.draft_models.eagle3.checkpoint import TRAINING_FILE as HEAD_TRAINING_FILE
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.eagle3.reading import Reading, changed, require_target
from outrider.draft_models.early_exit.checkpoint import read_meta
from outrider.draft_models.early_exit.model import EarlyExit
from outrider.draft_models.small_lm.model import TRAINING_FILE as LM_TRAINING_FILE
from outrider.draft_models.small_lm.model import SmallLM, last_id
from outrider.draft_models.targets.fingerprint import Fingerprint
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget, read_config
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.draft_models.targets.stack import LayerStack, require_layers
from outrider.draft_models.targets.target import Band, Target
from outrider.inference.doctor.scores import Recording, read
from outrider.inference.drafters.shaped import bare
from outrider.inference.loading.targets import templates_of
from outrider.inference.settings.kinds import EAGLE3, EARLY_EXIT, SMALL_LM, DrafterPlugin, read_record

if TYPE_CHECKING:
    from outrider.inference.drafters.eagle3 import Eagle3Plugin

DECLARED = "as declared"
STEPS = 2  # draft steps of a head: the first reads true features, the second also one of the head's own outputs
RECORDS = 32  # number of training records that are read
OLD_THETA = 10000.0  # EAGLE trains with this value, whatever its config says
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
# The drafter's logits [steps, places, V] on a recording, predicting each place: in step s the last s tokens before it
# were drafted, correctly.
Drafting = Callable[[Recording], Tensor]


@dataclass(frozen=True)
class Variant:
    """A variant of reading a drafter's checkpoint.

    name: how it differs from the declared one. option: the option that selects it; "": not available here.
    meaning: what is wrong with the drafter if this variant is better. boundaries: the layer boundaries at which it
    needs the target's hidden states.
    """

    name: str
    drafting: Drafting
    option: str = ""
    meaning: str = ""
    boundaries: tuple[int, ...] = ()


class Fact(NamedTuple):
    """A fact known without a pass. suspect: whether it may explain a bad drafter."""

    name: str
    said: str
    suspect: bool = False


@dataclass(frozen=True)
class Examinee:
    """A drafter to examine.

    declared: as its config declares. others: variants with one difference. known_tokens: its draft vocabulary; None:
    all tokens.
    """

    declared: Variant
    others: Sequence[Variant] = ()
    known_tokens: Sequence[int] | None = None
    facts: Sequence[Fact] = ()

    @property
    def boundaries(self) -> set[int]:
        """Boundaries of the target's layers at which its variants need hidden states."""
        return {one for way in (self.declared, *self.others) for one in way.boundaries}


@torch.inference_mode()
def draft_by_head(head: Eagle3, recording: Recording, *, still: bool = False) -> Tensor:
    """Logits [2, places, V] of a head: of the first draft step, and of the second one after a correct token.

    Entry t is the pair (feature t, token t + 1) and predicts token t + 2. In the second step an entry's feature is the
    output of the first step for t, and its token is token t + 2. It attends to the true entries up to t and to itself,
    at position t + 1. still: at position t instead, as in trainings that do not advance the position.
    """
    tokens, places = recording.tokens, torch.tensor(recording.places, device=recording.tokens.device)
    count = len(tokens) - 1
    aux = torch.cat([recording.aux_hidden[boundary] for boundary in head.reading.taps], dim=-1)[:, :count].to(
        head.dtype
    )
    index = torch.arange(count, device=tokens.device)
    head.reserve(count + 1)
    cache = DynamicCache()
    past = {window: None if window is None else Band.sliding(index, window) for window in head.windows}
    first = head.run(head.embed(tokens[None, 1:]), head.features(aux), past, head.rotary(index[None]), cache)
    own = places - STEPS - 1  # the entries whose outputs are the features of the second step
    true, itself = index <= own[:, None], torch.eye(len(own), dtype=torch.bool, device=tokens.device)
    positions = own + (0 if still else 1)
    masks = {}
    for window in head.windows:
        near = true if window is None else true & (positions[:, None] - index < window)
        masks[window] = torch.cat([near, itself], dim=1)[None, None]
    second = head.run(head.embed(tokens[None, own + 2]), first[:, own], masks, head.rotary(positions[None]), cache)
    return head.logits(torch.cat([first[:, places - STEPS], second]))


@torch.inference_mode()
def draft_by_exit(drafter: EarlyExit, stack: LayerStack, recording: Recording) -> Tensor:
    """Logits [1, places, V] of an early exit on the target `stack`."""
    hidden = recording.aux_hidden[drafter.exit_layer]
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    stack.reserve(len(positions))
    mask = None if drafter.window is None else Band.sliding(positions, drafter.window)
    out = drafter.run(hidden, mask, stack.rotary(positions[None]))
    return drafter.logits(out[:, [place - 1 for place in recording.places]])


@torch.inference_mode()
def draft_by_lm(lm: Target, recording: Recording) -> Tensor:
    """Logits [1, places, V'] of a small LM; its vocabulary size V' may differ from the target's."""
    start = recording.places[0] - 1
    logits, _ = read(lm, recording.tokens.clamp(max=last_id(lm)).tolist(), start)
    return logits[None, [place - 1 - start for place in recording.places]]


NOT_KNOWN = Fact("learned from", "not known: no record of its data")
UNSEEN = Fact(
    "not to be seen", "a loss mask that was not shifted with the labels, and too little or foreign training text"
)


def numbers(stored: object, run: torch.dtype) -> Fact:
    """The stored dtype of the weights (None: unknown), and the dtype they run in."""
    said, here = (str(one).removeprefix("torch.") for one in (stored or "a type not said", run))
    narrow = here == "float16" and said != here
    return Fact("numbers", f"stored in {said}, run in {here}" + ", whose range is smaller" * narrow, narrow)


def made_for(record: Mapping[str, object], target: OpenTarget) -> Fact:
    """Whether the target is the one that the drafter was trained on, as far as `record` tells."""
    if not record:
        return Fact("made for", "not known: no record of its training")
    name, settings = record.get("target", "a target not said"), record.get("settings")
    try:
        trained = construct(Fingerprint, settings.get("target") if isinstance(settings, dict) else None)
        differs = trained.differences(target.fingerprint)
    except UserError:
        return Fact("made for", f"{name}, whose weights were not recorded")
    if not differs:
        return Fact("made for", f"{name}, whose digests are this target's")
    return Fact("made for", f"{name}, not this target ({'; '.join(differs)})", True)


def training_facts(data: object, tokenizer: PreTrainedTokenizerBase, template: str | None) -> Iterator[Fact]:
    """Facts about `data`, the recorded settings of the training data (None: not recorded).

    template: the one that renders this evaluation's conversations; None: it has no conversations.
    """
    try:
        config: DataConfig = construct(DataConfig, data)
    except UserError:
        yield NOT_KNOWN
        return
    learned = templates_of(config.deciding(), tokenizer)
    if template is not None and learned:
        here = "tokenizer" if template == "auto" else template
        said = f"trained with {' and '.join(sorted(learned))}, prompts are rendered by {here}"
        yield Fact("template", said, here not in learned)
    yield learned_from(config, tokenizer)


def learned_from(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Fact:
    """The share of supervised tokens in the first records of the training data. Nothing is downloaded."""
    sources = {config.source} if config.source != "mix" else {part.source for _, _, part in config.parts()}
    if "hub" in sources:
        return Fact("learned from", "not looked at: its data lies on the Hub")
    try:
        records = list(islice(read_records(config, "train"), RECORDS))
        documents = encode(records, tokenizer, config.template, Counts())
    except UserError as error:
        return Fact("learned from", f"not known: its data cannot be read any more ({error})")
    tokens = sum(len(one.ids) for one in documents)
    share = sum(int(one.supervised.sum()) for one in documents) / max(1, tokens)
    said = f"{share:.1%} of the {tokens} tokens of its first {len(records)} records"
    return Fact("learned from", said, suspect=share == 0)


def examine_exit(
    plugin: DrafterPlugin[EarlyExit], model: EarlyExit, where: str, target: OpenTarget, stack: Target
) -> Examinee:
    """An early exit that is prepared to decode on `stack`."""
    drafter, meta = bare(model), read_meta(where)
    return Examinee(
        Variant(DECLARED, partial(draft_by_exit, drafter, require_layers(stack)), boundaries=(drafter.exit_layer,)),
        known_tokens=plugin.known_tokens(where),
        facts=[
            Fact("made for", f"{meta.fingerprint.target}, whose digests are this target's"),
            numbers(meta.dtype, stack.dtype),
        ],
    )


def examine_lm(
    plugin: DrafterPlugin[SmallLM], model: SmallLM, where: str, target: OpenTarget, stack: Target
) -> Examinee:
    """A small LM for `target`."""
    lm = cast("SmallLM", bare(model))
    record = read_record(where, LM_TRAINING_FILE)
    stored = read_config(where, role=SMALL_LM.name).dtype  # a loaded model's config has the dtype in which it runs
    return Examinee(
        Variant(DECLARED, partial(draft_by_lm, lm)),
        known_tokens=plugin.known_tokens(where),
        facts=[made_for(record, target), numbers(stored, lm.dtype)],
    )


def examine_head(plugin: "Eagle3Plugin", model: Eagle3, where: str, target: OpenTarget, stack: Target) -> Examinee:
    """An EAGLE-3 head that is prepared to draft for `stack`. Its weights are read once for all variants."""
    layered, shared = require_layers(stack), bare(model).shared_embedding
    embedding, output = shared[0] if shared else layered.embed_tokens.weight, layered.head.weight
    stored = open_head(where, target.config, changes=plugin.changes)
    tensors = stored.tensors(stack.dtype, stack.device)

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
    for name, changes, meaning in _neighbours(stored.reading, tensors, target):
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
    record = read_record(stored.source, HEAD_TRAINING_FILE)
    return Examinee(
        Variant(DECLARED, partial(draft_by_head, declared), boundaries=taps),
        variants,
        known_tokens=None if declared.draft_tokens is None else declared.draft_tokens.tolist(),
        facts=list(_head_facts(stored, record, declared, tensors, target)),
    )


def _head_facts(
    stored: StoredHead, record: Mapping[str, object], head: Eagle3, tensors: Mapping[str, Tensor], target: OpenTarget
) -> Iterator[Fact]:
    """The facts in a head's files. record: written by a training in this toolkit."""
    reading = stored.reading
    yield Fact("written", f"{'here' if stored.made_here else 'elsewhere'}, in the dialect of {stored.dialect}")
    match stored.config.get("speculators_config"):
        case _ if record:
            yield made_for(record, target)
        case {"verifier": {"name_or_path": name}} if name:
            yield Fact("made for", f"{name}; this target: {target.source}. A fine-tuned or quantised one agrees less")
    yield numbers(stored.config.get("dtype") or stored.config.get("torch_dtype"), head.dtype)
    some = reading.draft_vocabulary < reading.vocabulary
    yield Fact("draft vocabulary", f"{reading.draft_vocabulary} of {reading.vocabulary} tokens")
    if some and reading.draft_ids == "offset" and not tensors[D2T].any():
        first = f"the first {reading.draft_vocabulary} ids"
        yield Fact("d2t", f"all zero, so that its tokens are {first}: it was never put in", True)
    limit, context = reading.max_positions, context_limit(target.config)
    if limit < context:
        what = f"max_position_embeddings={limit}, below the target's {context}"
        yield Fact("positions", f"{what}: servers draft no further; this runtime does", True)


Neighbour = tuple[str, ReadingChanges, str]  # a variant's name, its changed fields, the head's fault if it is better


def _neighbours(reading: Reading, tensors: Mapping[str, Tensor], target: OpenTarget) -> Iterator[Neighbour]:
    """The variants to try; some may be impossible, or equal to the declared reading."""
    layers = target.config.num_hidden_layers
    later, earlier = (tuple(tap + step for tap in reading.taps) for step in (1, -1))
    yield f"taps a layer later {list(later)}", ReadingChanges(taps=later), _TAPS
    if earlier[0] >= 0:
        yield f"taps a layer earlier {list(earlier)}", ReadingChanges(taps=earlier), _TAPS
    usual = (2, layers // 2, layers - 3)
    if len(reading.taps) == 3 and layers >= 7:
        yield f"EAGLE's usual taps {list(usual)}", ReadingChanges(taps=usual), _TAPS
    yield from _ropes(target)
    for name, (what, said) in _SWITCHES.items():
        on = not getattr(reading, name)
        switch: dict[str, Any] = {name: on}
        changes = ReadingChanges(**switch)
        meaning = f"{what} {said if on else said.replace('is', 'is not').replace('are', 'are not')}"
        yield f"{name} {'on' if on else 'off'}", changes, meaning
    if D2T in tensors and reading.draft_vocabulary < reading.vocabulary:
        other: Literal["index", "offset"] = "index" if reading.draft_ids == "offset" else "offset"
        meaning = f"its d2t holds the {'ids of tokens' if other == 'index' else 'offsets of ids'}"
        yield f"d2t as {other}", ReadingChanges(draft_ids=other), meaning
    said = "was not the one in its file, which is random, another model's or overwritten"
    yield "target's embedding", ReadingChanges(own_embedding=False), f"in training its embedding {said}"
    yield "target's head", ReadingChanges(own_head=False), f"in training its head {said}"


def _ropes(target: OpenTarget) -> Iterator[Neighbour]:
    rope = getattr(target.config, "rope_parameters", None) or {}
    yield "the target's rope", ReadingChanges(rope="target"), _ROPE
    yield "a plain rope", ReadingChanges(rope="plain"), _ROPE
    for theta in (OLD_THETA, rope.get("rope_theta")):
        if isinstance(theta, int | float) and theta > 0:
            yield f"rope_theta {theta:g}", ReadingChanges(rope_theta=float(theta)), _ROPE
            both = ReadingChanges(rope="plain", rope_theta=float(theta))
            yield f"a plain rope of rope_theta {theta:g}", both, _ROPE


# By kind: (plugin, `prepare`d model, the model's path, target, stack) → its `Examinee`.
EXAMINERS: dict[str, Callable[..., Examinee]] = {
    EARLY_EXIT.name: examine_exit,
    SMALL_LM.name: examine_lm,
    EAGLE3.name: examine_head,
}

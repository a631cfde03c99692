"""Drafters that combine a draft model and a structure, and the calibration heads that some stop rules ask."""

import hashlib
import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, Unpack, cast

import torch
from torch import Tensor

from outrider.base.streams import Streams
from outrider.draft_models.calibration import META_FILE, drafter_digest, load_calibration
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.narrowed import spread
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.core.drafter import Drafter, DraftModel, Stopwatch
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import ROOT, DraftTree
from outrider.inference.settings.kinds import KINDS, PROMPT_LOOKUP, DrafterPlugin, Placed, Trained, read_record
from outrider.inference.settings.method import MethodConfig
from outrider.inference.shapes.factory import Structure, make_structure
from outrider.inference.sizing.costs import Allowance
from outrider.inference.sizing.policy import Tuning

if TYPE_CHECKING:
    from outrider.inference.drafters.ngram.lookup import LookupPlugin

Model = TypeVar("Model")


@dataclass(frozen=True)
class Calibrated(Generic[Model]):
    """A drafter of any kind with hidden states, and its calibration head; None: no method uses one."""

    drafter: Model
    head: CalibrationHead | None = None


def bare(model: Model | Calibrated[Model]) -> Model:
    """The drafter without its head, if `model` is `Calibrated`."""
    return model.drafter if isinstance(model, Calibrated) else model


def head_identity(source: str, where: str | None) -> str | None:
    """A short hash of the metadata of the calibration head of the drafter in `where`; None without a head."""
    name = KINDS[source].calibration
    described = None if where is None or name is None else Path(where) / name / META_FILE
    if described is None or not described.is_file():
        return None
    return hashlib.sha256(described.read_bytes()).hexdigest()[:16]


class ModelDrafter(Drafter):
    """A drafter that combines a draft model and a structure, the shape of its drafts.

    allowance: decides which rounds skip drafting; None: no round does. The model catches up with the tokens of skipped
    rounds when it drafts again. copies: where it drafts, a round skips the model; structure and allowance learn nothing
    from its drafts.
    """

    def __init__(
        self, model: DraftModel, structure: Structure, allowance: Allowance | None = None, copies: Drafter | None = None
    ):
        self.model, self.structure, self.allowance, self.copies = model, structure, allowance, copies
        self.split, self.aux_layers, self.max_rows = model.split, model.aux_layers, structure.max_rows
        structure.max_depth = min(structure.max_depth, getattr(model, "pass_tokens", structure.max_depth))

    @property
    def totals(self) -> Mapping[str, float]:
        return self.structure.totals

    def begin(self, session: Session, selector: TokenSelector, watch: Stopwatch) -> None:
        self._session = session
        by_index = selector.greedy and not self.structure.reads_root
        self._source = TimedModel(self.model, selector, watch, session.vocabulary, by_index=by_index)
        self.model.begin(session)
        if self.copies is not None:
            self.copies.begin(session, selector, watch)

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        self._source.begin_round()
        if self.copies is not None:
            copied = self.copies.draft(root, self.structure.steps(limit))
            if len(copied):
                return copied
        if self.allowance is not None and not self.allowance.opens(self.structure.rule.gain()):
            return DraftTree(root[:0], (), ())
        return self._source.with_ids(self.structure.draft(self._source, root, limit))

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        shares = self.model.split or self.model.aux_layers
        rows = self._session.path(nodes) if shares else [0, *(tree.rows[node] for node in nodes)]
        self.model.commit(rows, tokens)
        if self.copies is not None:
            self.copies.commit(tree, nodes, tokens)
        fed = self._source.fed
        if len(tree) and not fed:  # it was copied
            return
        if fed or self.allowance is None:
            self.structure.observe(tree, nodes)
        if self.allowance is not None:
            self.allowance.observe(fed, len(tree), len(nodes) + 1)


def copies_of(method: MethodConfig, structure: Structure, tuning: Tuning | None = None) -> Drafter | None:
    """What drafts from the text itself for a drafter of `method`, if it has `copy`: by `tuning` as many tokens as pay.

    The evidence of `tuning` is about other drafts.
    """
    if method.copy is None:
        return None
    copy_tuning = None if tuning is None else Tuning(tuning.costs)
    if copy_tuning is not None and tuning is not None and tuning.shared is not None:
        copy_tuning = copy_tuning.of_all(tuning.shared().sharing)
    return cast("LookupPlugin", PROMPT_LOOKUP.load_plugin()).copies(method.copy, structure.max_rows, copy_tuning)


class ModelDrafterPlugin(DrafterPlugin[Model]):
    """The plugin of a kind with a `draft_model`, whose drafts a structure shapes."""

    @abstractmethod
    def draft_model(self, model: Model, method: MethodConfig) -> DraftModel:
        """A new `DraftModel` for one generation."""

    def make(
        self, model: Model, method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        head = model.head if isinstance(model, Calibrated) else None
        structure = make_structure(method, streams, drawn, head, tuning)
        drafting, allowance = self.draft_model(bare(model), method), None if tuning is None else tuning.allowance()
        if isinstance(drafting, OnePass) and method.structure.kind == "chain":
            drafting.pass_tokens = min(drafting.pass_tokens, method.stop.longest())
        return ModelDrafter(drafting, structure, allowance, copies_of(method, structure, tuning))


class TrainedDrafterPlugin(ModelDrafterPlugin[Model]):
    """The plugin of a kind with a model of its own, to which a calibration head may belong.

    A model is `Calibrated` if a method uses its head. kind: its name in the registry. record: the file of its training.
    """

    kind: str
    record: str

    @abstractmethod
    def load_drafter(self, where: str, target: OpenTarget, **placement: Unpack[Placed]) -> Model:
        """As `load`, without a calibration head."""

    def load(
        self, where: str, target: OpenTarget, methods: Mapping[str, MethodConfig], **placement: Unpack[Placed]
    ) -> Model:
        if not any(method.source == self.kind and method.stop.needs_head for method in methods.values()):
            return self.load_drafter(where, target, **placement)
        made_for, folder = asdict(target.fingerprint), KINDS[self.kind].calibration or ""
        head = load_calibration(where, self.digest(where), placement["device"], made_for, folder=folder)
        return cast("Model", Calibrated(self.load_drafter(where, target, **placement), head))  # weights last

    def identity(self, where: str | None) -> dict[str, object]:
        weights = None if where is None else model_identity(open_tensors(where))
        return {self.kind: weights, f"{self.kind}_calibration": head_identity(self.kind, where)}

    def digest(self, where: str) -> str:
        return drafter_digest(open_tensors(where))

    def trained(self, where: str) -> Trained:
        return Trained.of(read_record(where, self.record))


class BesideTarget:
    """What draft models that begin at the target's first layer have alike. target: the session of the text."""

    split = 0
    aux_layers: tuple[int, ...] = ()
    target: Session
    hidden: Tensor

    @property
    def target_hidden(self) -> Tensor:
        return self.target.target_hidden


class OnePass(BesideTarget):
    """The part of a draft model that drafts `pass_tokens` tokens in one pass (PARD, arXiv 2504.18583).

    The pass of a round is over the root and, for each token after the first, the id `mask`. The logits after a row
    depend on its depth alone: the i-th token of every path is from the marginal distribution of the text's i-th next
    token. So no other row is run, and rows deeper than the pass have its last logits. The caches drop the masks.
    """

    mask: int
    pass_tokens: int

    @abstractmethod
    def run_pass(self, tokens: Tensor) -> Tensor:
        """Run the root and masks [n] and drop the masks; returns the logits after each [n, K], and sets `hidden`."""

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        if parents[0] == ROOT:
            room = self.target.context - self.target.base  # positions of the text
            masks = tokens.new_full((max(0, min(self.pass_tokens, room) - 1),), self.mask)
            self._logits = self.run_pass(torch.cat([tokens, masks]))
            self._hidden, self._depths = self.hidden, list[int]()  # both by depth; the depths of the round's rows
        depths = [0 if parent == ROOT else self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        rows = [min(depth, len(self._logits) - 1) for depth in depths]
        self.hidden = self._hidden[rows]
        return self._logits[rows]


class TimedModel:
    """A draft model as the `Source` of a round: times its passes, and tracks the text up to each row it was fed.

    by_index: for a model with a draft vocabulary, logits are [n, K] over that vocabulary, and the drafted tokens that
    it is fed are indices into it: choosing among a sixth of the tokens takes a sixth of the time. `with_ids` converts
    such a draft to token ids. Otherwise logits are [n, V] over the target's `vocabulary`, very low for other tokens.
    """

    def __init__(
        self, model: DraftModel, selector: TokenSelector, watch: Stopwatch, vocabulary: int, *, by_index: bool = False
    ):
        self._model, self._vocabulary = model, vocabulary
        self._ids = model.predicted if by_index else None
        self._selector, self._watch = selector, watch
        self.to_probs = None if selector.greedy else self._probabilities

    @property
    def hidden(self) -> Tensor:
        return self._model.hidden

    @property
    def target_hidden(self) -> Tensor:
        return self._model.target_hidden

    def begin_round(self) -> None:
        self._contexts: list[Tensor] = []
        self.fed: list[int] = []  # rows of every pass
        self._starts: list[float] = []  # of every pass, in seconds since the round began

    def laps(self) -> list[tuple[int, float]]:
        """The rows of every pass of this round, and the seconds from it to the next one, or until now."""
        times = itertools.pairwise([*self._starts, self._watch.seconds])
        return [(rows, end - start) for rows, (start, end) in zip(self.fed, times, strict=True)]

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        if self._ids is not None and self.fed:  # the root, fed first, is a token id
            tokens = self._ids[tokens]
        if self._selector.reads_context:
            for index, parent in enumerate(parents):  # the root, without a parent, is the text's last token
                before = self._contexts[parent] if parent >= 0 else self._selector.text[:-1]
                self._contexts.append(torch.cat([before, tokens[index : index + 1]]))
        self.fed.append(len(tokens))
        running = self._watch.begin("draft")
        self._starts.append(self._watch.seconds)
        logits, predicted = self._model.extend(tokens, parents), self._model.predicted
        if predicted is not None and self._ids is None:
            logits = spread(logits, predicted, self._vocabulary)
        self._watch.begin(running)
        return logits

    def with_ids(self, tree: DraftTree) -> DraftTree:
        """`tree`, which was drafted with this source, with token ids."""
        return tree if self._ids is None else replace(tree, tokens=self._ids[tree.tokens])

    def _probabilities(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        contexts = [self._contexts[row] for row in rows] if self._selector.reads_context else None
        probs = self._selector.probabilities(logits, contexts)
        return probs.nan_to_num_(1 / logits.shape[-1])  # rows of NaN become uniform, so that tokens can be drawn

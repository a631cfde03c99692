"""Drafters that combine a draft model and a structure, and the calibration heads that some stop rules ask."""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from outrider.base.streams import Streams
from outrider.draft_models.calibration import META_FILE, load_calibration
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.targets.narrowed import spread
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.inference.core.drafter import Drafter, DraftModel, Stopwatch
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree
from outrider.inference.settings.kinds import KINDS, DrafterPlugin
from outrider.inference.settings.method import MethodConfig
from outrider.inference.shapes.factory import Structure, make_structure
from outrider.inference.sizing.costs import Allowance
from outrider.inference.sizing.policy import Tuning

Model = TypeVar("Model")


@dataclass(frozen=True)
class Calibrated(Generic[Model]):
    """A drafter of any kind with hidden states, and its calibration head; None: no method uses one."""

    drafter: Model
    head: CalibrationHead | None = None


def bare(model: Model | Calibrated[Model]) -> Model:
    """The drafter without its head, if `model` is `Calibrated`."""
    return model.drafter if isinstance(model, Calibrated) else model


def head_of(model: object) -> CalibrationHead | None:
    """The head of `model`, if it is `Calibrated`."""
    return model.head if isinstance(model, Calibrated) else None


def head_asked(
    source: str, plugin: DrafterPlugin, where: str, target: OpenTarget, methods: Mapping[str, MethodConfig],
    device: torch.device | str, **widths: int,
) -> CalibrationHead | None:  # fmt: skip
    """The head of the drafter in `where`, read by `plugin`; None if no method with that `source` uses one.

    widths: as in `load_calibration`, which also documents the errors.
    """
    if not any(method.source == source and method.stop.needs_head for method in methods.values()):
        return None
    made_for, folder = asdict(target.fingerprint), KINDS[source].calibration or ""
    return load_calibration(where, plugin.digest(where), device, made_for, folder=folder, **widths)


def head_identity(source: str, where: str | None) -> str | None:
    """A short hash of the metadata of the calibration head of the drafter in `where`; None without a head."""
    folder = None if where is None else KINDS[source].head_folder(where)
    described = None if folder is None else folder / META_FILE
    if described is None or not described.is_file():
        return None
    return hashlib.sha256(described.read_bytes()).hexdigest()[:16]


class ModelDrafter(Drafter):
    """A drafter that combines a draft model and a structure, the shape of its drafts.

    allowance: decides which rounds skip drafting; None: no round does. The model catches up with the tokens of skipped
    rounds when it drafts again.
    """

    def __init__(self, model: DraftModel, structure: Structure, allowance: Allowance | None = None):
        self.model, self.structure, self.allowance = model, structure, allowance
        self.split, self.aux_layers, self.max_rows = model.split, model.aux_layers, structure.max_rows

    @property
    def totals(self) -> Mapping[str, float]:
        return self.structure.totals

    def begin(self, session: Session, selector: TokenSelector, watch: Stopwatch) -> None:
        self._session = session
        by_place = selector.greedy and not self.structure.reads_root
        self._source = TimedModel(self.model, selector, watch, session.vocabulary, by_place=by_place)
        self.model.begin(session)

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        self._source.begin_round()
        if self.allowance is not None and self.allowance.spent():
            return DraftTree(root[:0], (), ())
        return self._source.with_ids(self.structure.draft(self._source, root, limit))

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self.model.commit(rows_known(self.model, self._session, tree, nodes), tokens)
        fed = self._source.fed
        if fed or self.allowance is None:
            self.structure.observe(tree, nodes)
        if self.allowance is not None:
            self.allowance.observe(fed, len(tree), len(nodes) + 1)


class ModelDrafterPlugin(DrafterPlugin[Model]):
    """The plugin of a kind whose drafts, by its `draft_model`, are shaped by a structure."""

    @abstractmethod
    def draft_model(self, model: Model, method: MethodConfig) -> DraftModel:
        """A new `DraftModel` for one generation."""

    def make(
        self, model: Model, method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        structure = make_structure(method, streams, drawn, head_of(model), tuning)
        return ModelDrafter(self.draft_model(model, method), structure, allowance_of(tuning))


def allowance_of(tuning: Tuning | None) -> Allowance | None:
    """The `Allowance` of a method with measured costs; None for others, which draft in every round."""
    return None if tuning is None else Allowance(tuning.costs)


def rows_known(model: DraftModel, session: Session, tree: DraftTree, nodes: Sequence[int]) -> list[int]:
    """The rows of the root and of `nodes` of `tree`, for `DraftModel.commit`."""
    if model.split or model.aux_layers:
        return session.path(nodes)
    return [0, *(tree.rows[node] for node in nodes)]


class TimedModel:
    """A draft model as the `Source` of a round: times its passes, and tracks the text up to each row it was fed.

    by_place: for a model with a draft vocabulary, logits are [n, K] over that vocabulary, and the drafted tokens that
    it is fed are indices into it: choosing among a sixth of the tokens takes a sixth of the time. `with_ids` converts
    such a draft to token ids. Otherwise logits are [n, V] over the target's `vocabulary`, very low for other tokens.
    """

    def __init__(
        self, model: DraftModel, selector: TokenSelector, watch: Stopwatch, vocabulary: int, *, by_place: bool = False
    ):
        self._model, self._vocabulary = model, vocabulary
        self._ids = model.predicted if by_place else None
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

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        if self._ids is not None and self.fed:  # the root, fed first, is a token id
            tokens = self._ids[tokens]
        if self._selector.reads_context:
            for place, parent in enumerate(parents):  # the root, without a parent, is the text's last token
                before = self._contexts[parent] if parent >= 0 else self._selector.text[:-1]
                self._contexts.append(torch.cat([before, tokens[place : place + 1]]))
        self.fed.append(len(tokens))
        with self._watch.part("draft"):
            logits = self._model.extend(tokens, parents)
            predicted = self._model.predicted
            return logits if predicted is None or self._ids is not None else spread(logits, predicted, self._vocabulary)

    def with_ids(self, tree: DraftTree) -> DraftTree:
        """`tree`, which was drafted with this source, with token ids."""
        return tree if self._ids is None else replace(tree, tokens=self._ids[tree.tokens])

    def _probabilities(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        contexts = [self._contexts[row] for row in rows] if self._selector.reads_context else None
        return self._selector.draft_probabilities(logits, contexts)

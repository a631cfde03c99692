"""A small causal LM as the drafter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.base.errors import UserError
from outrider.base.files import save_parts
from outrider.draft_models.draft_vocabulary import read_draft_vocabulary
from outrider.draft_models.small_lm.model import (
    MASK_TOKEN,
    PASS_TOKENS,
    TRAINING_FILE,
    SmallLM,
    last_id,
    load_small_lm,
    load_whole_lm,
)
from outrider.draft_models.targets.model_files import empty_model
from outrider.draft_models.targets.open_target import OpenTarget, position_limit, read_config
from outrider.draft_models.targets.target import Target
from outrider.inference.core.drafter import DraftModel
from outrider.inference.core.session import Session
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.shaped import TrainedDrafterPlugin, bare
from outrider.inference.engines.packing import lay_out
from outrider.inference.settings import CHAIN_TOKENS, LONGEST_CHAIN
from outrider.inference.settings.kinds import Placed
from outrider.inference.settings.method import MethodConfig


class SmallLMSource:
    """A small LM that shares only the vocabulary with the target.

    It runs in its own session, next to the target's. A row that was verified without being extended has no entry in
    its cache. The row's token waits in `_pending` and runs with the next extension, before the root. Logits of all
    tokens are cut or padded with −∞ to the target's vocabulary size.
    """

    split = 0
    aux_layers: tuple[int, ...] = ()
    hidden: Tensor

    def __init__(self, lm: Target):
        self.lm = lm
        self.predicted = lm.predicted

    def begin(self, session: Session) -> None:
        """Raises `UserError` if the text may exceed the model's context."""
        limit = position_limit(self.lm.config)
        if limit is not None and session.context > limit:
            raise UserError(
                f"prompt + max_new_tokens = {session.context} positions, but the drafter has learned only {limit}; "
                "shorten one of them, or use a drafter with a longer context"
            )
        self.target = session
        self.vocabulary = session.vocabulary
        self._last = last_id(self.lm)
        prompt = self._known(session.tokens.to(self.lm.device))
        self.session = session.draft_session(self.lm)
        self.session.feed(prompt, chain_parents(0, len(prompt)))
        self.session.commit(range(len(prompt)))
        self._pending = prompt[:0]

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        waiting = len(self._pending)
        first = self.session.rows == 0
        if first and waiting:
            tokens, parents = torch.cat([self._pending, tokens]), chain_parents(0, waiting + len(parents))
        elif waiting:
            parents = [parent + waiting for parent in parents]
        skip = waiting if first else 0
        hidden, logits = self.session.extend(self._known(tokens), parents, len(parents) - skip)
        self.hidden = hidden[skip:]
        return logits if self.predicted is not None else fit_vocabulary(logits, self.vocabulary)

    def _known(self, tokens: Tensor) -> Tensor:
        """The ids; ids beyond its embedding, which a text may contain, are replaced by its last one."""
        return tokens if self._last >= self.vocabulary - 1 else tokens.clamp(max=self._last)

    @property
    def target_hidden(self) -> Tensor:
        return self.target.target_hidden

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        waiting = len(self._pending)
        extended = self.session.rows - waiting  # ≤ 0: no row was extended, and the pending tokens continue to wait
        known = [row for row in rows if 0 <= row < extended]
        unknown = torch.tensor(tokens[len(known) :], dtype=torch.long, device=self.lm.device)
        if extended > 0:
            self.session.commit([*range(waiting), *(row + waiting for row in known)])
            self._pending = unknown
        else:
            self._pending = torch.cat([self._pending, unknown])


class ParallelSource(SmallLMSource):
    """A small LM that drafts `pass_tokens` tokens in one pass (PARD, arXiv 2504.18583).

    The pass of a round is over the root and, for each token after the first, the token `mask`. The logits after a row
    depend on its depth alone: the i-th token of every path is from the marginal distribution of the text's i-th next
    token. So no other row is run, and rows deeper than the pass have its last logits. The cache drops the masks:
    accepted tokens wait in `_pending`, and run before the next root.
    """

    one_pass = True  # a draft has no further one

    def __init__(self, lm: Target, mask: int, tokens: int):
        super().__init__(lm)
        self.mask, self.pass_tokens = mask, tokens
        self._depths: list[int] = []  # of the round's rows
        self._logits, self._hidden = torch.empty(0), torch.empty(0)  # by depth

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        if self.session.rows == 0:
            left = self.session.context - self.session.base - len(self._pending)  # positions of the text
            masks = tokens.new_full((max(0, min(self.pass_tokens, left) - 1),), self.mask)
            self._logits = super().extend(torch.cat([tokens, masks]), chain_parents(0, len(masks) + 1))
            self._hidden = self.hidden
            self._depths.clear()
        depths = [0 if parent < 0 else self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        places = [min(depth, len(self._logits) - 1) for depth in depths]
        self.hidden = self._hidden[places]
        return self._logits[places]

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        super().commit(rows[:1], tokens)  # the rows after the root were masks


def source_of(lm: Target, longest: int) -> SmallLMSource:
    """The draft model of a small LM, as its config says. longest: the most tokens of a draft."""
    mask = getattr(lm.config, MASK_TOKEN, None)
    if mask is None:
        return SmallLMSource(lm)
    return ParallelSource(lm, mask, min(longest, getattr(lm.config, PASS_TOKENS, CHAIN_TOKENS)))


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Logits [n, V'] with the vocabulary axis cut to `size`, or padded to it with −∞."""
    if logits.shape[-1] >= size:
        return logits[..., :size]
    return F.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)


class SmallLMPlugin(TrainedDrafterPlugin[SmallLM]):
    """The model is a `SmallLM`."""

    kind, record = "small_lm", TRAINING_FILE

    def load_drafter(self, where: str, target: OpenTarget, **placed: Unpack[Placed]) -> SmallLM:
        return load_small_lm(where, target.tokenizer, **placed)

    def prepare(self, model: SmallLM, target: Target) -> None:
        lay_out(bare(model), target.device)

    def own_models(self, model: SmallLM) -> list[Target]:
        return [cast(Target, bare(model))]

    def known_tokens(self, where: str) -> Sequence[int] | None:
        own = read_draft_vocabulary(where, None, read_config(where, role="small_lm"))
        return None if own is None else own.tokens.tolist()

    def serve(self, where: str, target: OpenTarget, dtype: torch.dtype, folder: Path) -> None:
        save_parts(folder, load_whole_lm(where, target.tokenizer, dtype, target.vocabulary_size))

    def empty(self, where: str, target: PreTrainedConfig) -> nn.Module:
        return empty_model(read_config(where, role="small_lm"))

    def draft_model(self, model: SmallLM, method: MethodConfig) -> DraftModel:
        return source_of(model, method.stop.longest() if method.structure.kind == "chain" else LONGEST_CHAIN)


PLUGIN = SmallLMPlugin()

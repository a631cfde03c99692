"""An early exit as the drafter: an exit layer on the hidden states of the target's first layers (EESD).

A session runs the target over one text. Its rows are the tokens that run in a round, the first one the root, the last
token of the text. `base` positions before them are committed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.draft_models.early_exit import checkpoint
from outrider.draft_models.early_exit.checkpoint import from_pretrained
from outrider.draft_models.early_exit.model import EarlyExit
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.stack import require_layers
from outrider.draft_models.targets.target import Target
from outrider.inference.core.drafter import DraftModel
from outrider.inference.core.session import Session, View
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.draft_model import BesideTarget, OnePass
from outrider.inference.drafters.early_exit import KIND
from outrider.inference.drafters.model_plugin import TrainedDrafterPlugin, head_identity, without_calibration
from outrider.inference.drafters.plugin import Methods, ModelOptions, TrainingRecord
from outrider.inference.engines.packing import lay_out
from outrider.inference.settings.method import MethodConfig


class EarlyExitDraftModel(BesideTarget):
    """EESD's draft model: an exit layer after the target's first `split` layers (arXiv 2406.03853, eq. 1).

    The exit layer has its own cache. A row that was verified without being extended (the last token of a draft) has no
    entry there. Its hidden state is kept in `_pending` and is run with the next extension. Example of a round:

        extend(root), extend("a")     the session has rows 0 and 1, the exit's cache entries for them; "b" is drafted
        the target verifies           the session adds row 2 for "b"; both drafted tokens are accepted
        commit([0, 1, 2], …)          the exit's cache keeps rows 0 and 1; the hidden state of row 2 is pending
        extend(root)                  the exit runs "b", of the last round (row −1), and the new root
    """

    def __init__(self, drafter: EarlyExit):
        self.drafter = drafter
        self.split = drafter.exit_layer
        self.predicted = drafter.draft_tokens

    def begin(self, session: Session) -> None:
        self.target_session = self.session = session = session.require_layers()  # drafter and target share it
        self.cache = session.draft_cache(self.drafter, range(self.split, self.split + len(self.drafter.layers)))
        prompt_hidden = session.hidden
        self._exit(prompt_hidden, 0, logit_count=0)  # fills the exit's cache
        self._pending = prompt_hidden[:, :0]  # [1, n, d], hidden states that the exit layer has not read

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        first_row = self.session.rows
        hidden = self.feed(tokens, parents)
        pending_count = self._pending.shape[1]
        if pending_count:
            hidden = torch.cat([self._pending, hidden], dim=1)
            self._pending = self._pending[:, :0]
        hidden, logits = self._exit(hidden, first_row - pending_count, len(parents))
        self.hidden = hidden[0, pending_count:]
        return logits[0]

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Add rows to the session, through the target's first layers; returns their hidden states [1, n, d]."""
        return self.session.feed(tokens, parents)

    def _exit(self, hidden: Tensor, start: int, logit_count: int) -> tuple[Tensor, Tensor]:
        """Run the exit layer on hidden states [1, n, d] of rows start, start + 1, …; negative rows are committed ones.

        Returns its output [1, n, d] and the logits of the last `logit_count` rows [1, logit_count, draft vocabulary].
        """
        drafter = self.drafter

        def exit_pass(hidden: Tensor, view: View) -> tuple[Tensor, Tensor]:
            hidden = drafter.run(hidden, view.masks()[drafter.window], view.rotary, view.cache)
            return hidden, drafter.draft_logits(view.logit_rows(hidden)) if logit_count else hidden[:, :0]

        pass_name = f"exit {id(drafter)}"
        hidden, logits = self.session.run_draft_layers(pass_name, exit_pass, hidden, start, self.cache, logit_count)
        return hidden, logits[:, logits.shape[1] - logit_count :]  # passes of fixed shape return more rows

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        base_length = self.session.base
        extended_count = max(0, self.cache.length - base_length)  # of this round's rows
        cached_rows = [row for row in rows if row < extended_count]
        if len(cached_rows) < len(rows):
            new_hidden = self.session.hidden[:, list(rows[len(cached_rows) :])]  # [1, n, d]
            self._pending = torch.cat([self._pending, new_hidden], dim=1)
        if self.cache.length > base_length:
            self.cache.keep(base_length, cached_rows)


class EarlyExitPasses(EarlyExitDraftModel):
    """The passes of an early exit that drafts several tokens in one: `OnePass` runs the root and a mask for each other.

    The target's first layers run over masks, too. So the session drops the whole pass, and the root runs again when the
    draft is verified. The exit's cache keeps the root.
    """

    def run_pass(self, tokens: Tensor) -> Tensor:
        logits = self.extend(tokens, chain_parents(0, len(tokens)))
        self.session.first_cache.keep(self.session.base, ())
        self.session.start_round()
        self.cache.keep(self.session.base, [0])
        return logits

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        drafter, stack = self.drafter, self.session.stack

        def masked_pass(tokens: Tensor, view: View) -> tuple[Tensor]:
            hidden = drafter.embed(stack, tokens[None], view.positions)
            return (stack.run(hidden, 0, drafter.exit_layer, view.rotary, view.masks(), view.cache),)

        (hidden,) = self.session.run_rows(f"masks of exit {id(drafter)}", masked_pass, tokens, parents)
        return hidden


def draft_model_of(drafter: EarlyExit) -> DraftModel:
    """The draft model of an early exit, as it was trained; a mask has the first id after the vocabulary."""
    if not drafter.parallel:  # the tokens that it drafts in one pass; 0: one
        return EarlyExitDraftModel(drafter)
    return OnePass(EarlyExitPasses(drafter), mask=drafter.vocabulary, pass_tokens=drafter.parallel)


class EarlyExitPlugin(TrainedDrafterPlugin[EarlyExit]):
    """What is done with early exits (see `DrafterPlugin`). where: the directory of a drafter's files."""

    kind, own_sessions = KIND, True

    def identity(self, where: str | None) -> dict[str, object]:
        weights_digest = None if where is None else self.digest(where)[:16]
        return {"checkpoint": weights_digest, "calibration": head_identity(KIND, where)}

    def digest(self, where: str) -> str:
        return checkpoint.read_meta(where).weights_sha256

    def load(self, where: str, target: OpenTarget, methods: Methods, **options: Unpack[ModelOptions]) -> EarlyExit:
        checkpoint.require_target(checkpoint.read_meta(where), target.fingerprint, where)  # first: it names the cause
        return super().load(where, target, methods, **options)

    def load_drafter(self, where: str, target: OpenTarget, **options: Unpack[ModelOptions]) -> EarlyExit:
        return from_pretrained(where, target.config, target.fingerprint, **options)

    def training_record(self, where: str) -> TrainingRecord:
        meta = checkpoint.read_meta(where)
        record, fingerprint = TrainingRecord.of(meta.training), meta.fingerprint
        return replace(record, target=fingerprint.target, revision=fingerprint.revision)

    def prepare(self, model: EarlyExit, target: Target) -> None:
        drafter = without_calibration(model)
        lay_out(drafter, target.device)  # fuses layers, and packs weights as the device's kernels read them
        if drafter.head is not None:  # it has a head of its own
            return
        drafter.use_head(require_layers(target).head)
        if drafter.draft_tokens is not None:
            head_modules = nn.ModuleList(drafter.shared_head)
            lay_out(head_modules, target.device)
            drafter.shared_head = [*head_modules]

    def draft_vocabulary(self, where: str) -> Sequence[int] | None:
        return checkpoint.read_draft_tokens(where)

    def empty_model(self, where: str, target: PreTrainedConfig) -> nn.Module:
        drafter = checkpoint.empty_drafter(checkpoint.read_meta(where), target)
        # With a draft vocabulary, a head that it does not own is a copy of the target's rows, outside its parameters.
        return drafter if drafter.draft_tokens is None else nn.ModuleList([drafter, drafter.output_head])

    def export(self, where: str, target: OpenTarget, dtype: torch.dtype, folder: Path) -> None:
        drafter = from_pretrained(where, target.config, target.fingerprint, dtype=dtype)
        save_parts(folder, checkpoint.as_causal_lm(drafter, target, dtype))

    def draft_model(self, model: EarlyExit, method: MethodConfig) -> DraftModel:
        return draft_model_of(model)

"""A small causal LM as the drafter.

One of PARD drafts several tokens in one pass, over the root (the last token of the text) and mask tokens. One of PARD-2
also reads hidden states of the target, which a projection adds to its embedding. A row is a token that a session runs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.base.errors import UserError, require
from outrider.draft_models.draft_vocabulary import read_draft_vocabulary
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.small_lm import model as lm_model
from outrider.draft_models.small_lm.model import MASK_TOKEN, PASS_TOKENS, SmallLM
from outrider.draft_models.small_lm.pard2 import PROJECTION_FILE, Pard2, projection_config
from outrider.draft_models.targets.model_files import empty_model
from outrider.draft_models.targets.model_spec import UNLIMITED
from outrider.draft_models.targets.open_target import OpenTarget, position_limit, read_config
from outrider.draft_models.targets.target import Target
from outrider.inference.core.drafter import DraftModel
from outrider.inference.core.session import Session, View
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.draft_model import BesideTarget, OnePass
from outrider.inference.drafters.model_plugin import TrainedDrafterPlugin, without_calibration
from outrider.inference.drafters.plugin import ModelOptions
from outrider.inference.drafters.small_lm import KIND
from outrider.inference.engines.packing import lay_out
from outrider.inference.settings.method import MethodConfig


class SmallLMDraftModel(BesideTarget):
    """A small LM that shares only the vocabulary with the target.

    It runs in its own session, next to the target's. A token that was accepted without being extended has no entry in
    its cache. The token waits in `_pending` and runs with the next extension, before the root. Logits of all tokens are
    cut or padded with −∞ to the target's vocabulary size; those over a draft vocabulary stay as they are.
    """

    def __init__(self, lm: Target):
        self.lm = lm
        self.predicted = lm.predicted  # ids of its draft vocabulary, which its logits are over; None: all tokens

    def begin(self, session: Session) -> None:
        """Raises `UserError` if the text may exceed the model's context."""
        limit = position_limit(self.lm.config)
        if limit is not None and session.context > limit:
            raise UserError(
                f"prompt + max_new_tokens = {session.context} positions, but the drafter has learned only {limit}; "
                "shorten one of them, or use a drafter with a longer context"
            )
        self.target_session = session
        self.vocabulary = session.vocabulary
        self._last = lm_model.last_id(self.lm)  # the highest id that it can read; UNLIMITED with a draft vocabulary
        prompt = self._clamp(session.tokens.to(self.lm.device))
        self.session = session.draft_session(self.lm)
        self._feed_prompt(prompt)
        self.session.commit(range(len(prompt)))
        self._pending = prompt[:0]  # [n], tokens that the model has not read

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """See `DraftModel.extend`. A round's first pass is over a chain from the root, after the pending tokens."""
        pending_count = len(self._pending)
        pending_rows = pending_count if self.session.rows == 0 else 0  # of this pass
        if pending_rows:
            tokens, parents = torch.cat([self._pending, tokens]), chain_parents(0, pending_count + len(parents))
        elif pending_count:
            parents = [parent + pending_count for parent in parents]
        hidden, logits = self._run(self._clamp(tokens), parents, len(parents) - pending_rows)
        self.hidden = hidden[pending_rows:]
        return logits if self.predicted is not None else fit_vocabulary(logits, self.vocabulary)

    def _feed_prompt(self, prompt: Tensor) -> None:
        self.session.feed(prompt, chain_parents(0, len(prompt)))

    def _run(self, tokens: Tensor, parents: Sequence[int], logit_count: int) -> tuple[Tensor, Tensor]:
        """See `Session.extend`."""
        return self.session.extend(tokens, parents, logit_count)

    def _clamp(self, tokens: Tensor) -> Tensor:
        """`tokens`, where ids beyond the model's embedding, which a text may contain, are its last id."""
        return tokens if self._last >= self.vocabulary - 1 else tokens.clamp(max=self._last)

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """End the round; rows: the index of each of `tokens` among those extended, −1: not extended.

        Example: with one token pending, the root and "a" were extended, and "b" after them was drafted from the logits
        of "a". The session's rows are the pending token, the root and "a". If both drafted tokens are accepted, rows
        [0, 1, −1] commit these three, and "b" is pending.
        """
        pending_count = len(self._pending)
        extended_count = self.session.rows - pending_count  # ≤ 0: none was extended, and the pending tokens still wait
        cached_rows = [row for row in rows if 0 <= row < extended_count]
        uncached_tokens = torch.tensor(tokens[len(cached_rows) :], dtype=torch.long, device=self.lm.device)
        if extended_count > 0:
            self.session.commit([*range(pending_count), *(row + pending_count for row in cached_rows)])
            self._pending = uncached_tokens
        else:
            self._pending = torch.cat([self._pending, uncached_tokens])


class SmallLMPasses(SmallLMDraftModel):
    """The passes of a small LM that drafts several tokens in one (see `OnePass`). Accepted ones wait in `_pending`, and
    run before the next root."""

    def run_pass(self, tokens: Tensor) -> Tensor:
        return self.extend(tokens, chain_parents(0, len(tokens)))

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        super().commit(rows[:1], tokens)  # the rows after the root were masks


class Pard2Passes(SmallLMPasses):
    """The passes of a PARD-2 model.

    `_states` [1, pending + 1, k · d] are the target's hidden states, of width d at k boundaries of layers, before each
    pending token and before the next root. The pass that verified a token's predecessor computed them. Masks have those
    of the root.
    """

    def __init__(self, lm: Pard2):
        """Raises `UserError` if `lm` was prepared for no target that runs layer by layer."""
        super().__init__(lm)
        expected = "false, as no target runs layer by layer here"
        require(bool(lm.target_norm), "target_states", setting=True, expected=expected)
        self.pard2, self.aux_layers = lm, lm.projection.boundaries

    def _feed_prompt(self, prompt: Tensor) -> None:
        self._states = F.pad(self._read_states(range(len(prompt))), (0, 0, 1, 0))  # before the first token: 0
        self._run(prompt, chain_parents(0, len(prompt)), 1)
        self._states = self._states[:, -1:]

    def _run(self, tokens: Tensor, parents: Sequence[int], logit_count: int) -> tuple[Tensor, Tensor]:
        """See `Session.extend`; every pass is over a chain after the session's base. "PARD-2" is the pass's name."""
        lm = self.pard2

        def pass_(x: Tensor, view: View) -> tuple[Tensor, Tensor]:
            hidden = lm.run(x, 0, len(lm.layers), view.rotary, view.masks(), view.cache)
            return hidden, lm.draft_logits(view.logit_rows(hidden))

        row_indices = torch.arange(len(tokens), device=tokens.device)  # [n]
        states = self._states[:, row_indices.clamp(max=self._states.shape[1] - 1)]  # [1, n, k · d]
        x = lm.embed(tokens[None], self.session.base + row_indices[None]) + lm.projection(states)  # [1, n, d]
        hidden, logits = self.session.require_layers().run_rows("PARD-2", pass_, x, parents, logit_count)
        return hidden[0], logits[0, -logit_count:]

    def _read_states(self, rows: Sequence[int]) -> Tensor:
        """The projection's input [1, n, k · d] at the target session's rows; states after its last layer are normed."""
        return self.pard2.projection.join_states(self.target_session.aux_hidden(rows), self.pard2.target_norm[0])

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """rows: of `tokens` in the target's session, never −1; the states there stand before the next tokens."""
        states = torch.cat([self._states, self._read_states(rows)], dim=1)
        super().commit(rows, tokens)
        self._states = states[:, -len(self._pending) - 1 :]


def draft_model_of(lm: Target, *, target_states: bool = True) -> DraftModel:
    """The draft model of a small LM, as its config says; target_states: False leaves out the projection of PARD-2."""
    mask_token, tokens_per_pass = (getattr(lm.config, name, None) for name in (MASK_TOKEN, PASS_TOKENS))
    if mask_token is None:
        return SmallLMDraftModel(lm)
    passes = Pard2Passes(lm) if isinstance(lm, Pard2) and target_states else SmallLMPasses(lm)
    return OnePass(passes, mask_token, tokens_per_pass or UNLIMITED)  # without PASS_TOKENS the method decides


def fit_vocabulary(logits: Tensor, vocabulary_size: int) -> Tensor:
    """Logits [n, V'] with the vocabulary axis cut to `vocabulary_size`, or padded to it with −∞."""
    if logits.shape[-1] >= vocabulary_size:
        return logits[..., :vocabulary_size]
    return F.pad(logits, (0, vocabulary_size - logits.shape[-1]), value=-torch.inf)


class SmallLMPlugin(TrainedDrafterPlugin[SmallLM]):
    """What is done with small LMs (see `DrafterPlugin`). where: a directory, GGUF file or Hub name."""

    kind, record = KIND, lm_model.TRAINING_FILE

    def load(
        self, where: str, target: OpenTarget, methods: Mapping[str, MethodConfig], **options: Unpack[ModelOptions]
    ) -> SmallLM:
        """See `DrafterPlugin.load`. Raises `UserError` too unless the methods' `target_states` fit."""
        pard2 = projection_config(read_config(where, role="small_lm"))
        state_choices = {method.target_states for method in methods.values() if method.source == self.kind.name}
        expected = f"true: small_lm={where} has no projection of the target's hidden states"
        require(pard2 is not None or False not in state_choices, "target_states", setting=False, expected=expected)
        if pard2 is not None and state_choices != {False}:
            fits = target.is_seen and pard2.boundaries(target.config) is not None
            expected = f"PARD-2 for this target's hidden states, not {pard2}; or methods.NAME.target_states=false"
            require(fits, self.kind.name, where, expected)
        return super().load(where, target, methods, **options)

    def identity(self, where: str | None) -> dict[str, object]:
        """A projection in a file of its own counts too."""
        projection_path = None if where is None else Path(where, PROJECTION_FILE)
        if projection_path is None or not projection_path.is_file():
            return super().identity(where)
        return {**super().identity(where), "projection": hashlib.sha256(projection_path.read_bytes()).hexdigest()[:16]}

    def load_drafter(self, where: str, target: OpenTarget, **options: Unpack[ModelOptions]) -> SmallLM:
        config = target.config if target.is_seen else None  # of a server's model only tokens are seen
        return lm_model.load_small_lm(where, target.tokenizer, target=config, **options)

    def prepare(self, model: SmallLM, target: Target) -> None:
        lm = without_calibration(model)
        lay_out(lm, target.device)  # fuses layers, and packs weights as the device's kernels read them
        if isinstance(lm, Pard2):
            lm.target_norm = [] if target.layered is None else [target.layered.norm]  # in a list: no submodule

    def causal_lms(self, model: SmallLM) -> list[Target]:
        return [cast(Target, without_calibration(model))]

    def draft_vocabulary(self, where: str) -> Sequence[int] | None:
        vocabulary = read_draft_vocabulary(where, None, read_config(where, role="small_lm"))
        return None if vocabulary is None else vocabulary.tokens.tolist()

    def export(self, where: str, target: OpenTarget, dtype: torch.dtype, folder: Path) -> None:
        save_parts(folder, lm_model.load_for_engine(where, target.tokenizer, dtype, target.vocabulary_size))

    def empty_model(self, where: str, target: PreTrainedConfig) -> nn.Module:
        return empty_model(read_config(where, role="small_lm"))

    def draft_model(self, model: SmallLM, method: MethodConfig) -> DraftModel:
        return draft_model_of(model, target_states=method.target_states)

"""An EAGLE-3 head as the drafter: a decoder layer on aux hidden states of the target and the tokens after them.

Aux hidden states are those at chosen boundaries of the target's layers (`taps`). The head makes a feature of those at a
position. The root is the last token of the text, under which tokens are drafted.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.draft_models.eagle3 import checkpoint
from outrider.draft_models.eagle3.dialects import is_head, local_name
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.core.drafter import DraftModel
from outrider.inference.core.session import Session, View
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.draft_model import BesideTarget
from outrider.inference.drafters.eagle3 import KIND
from outrider.inference.drafters.head_plugin import HeadPlugin
from outrider.inference.settings.method import MethodConfig


class Eagle3DraftModel(BesideTarget):
    """EAGLE-3's draft model (arXiv 2503.01840), in its own session next to the target's.

    An entry of its cache is a pair: the target's feature at a position, and the token at the next position. So there is
    one entry fewer than tokens, and a token's entry has the previous position:

        position   0    1    2    3 = base of the target's session
        token      a    b    c    root
        pairs        (0,b) (1,c) (2,root)       entries 0, 1, 2; the last one's logits predict the first drafted token

    A pair is pending until both halves are known. Its feature comes from the pass that verified its position; its token
    is known at the latest as the next root. All pending pairs run in one pass at the start of a draft. A drafted
    token's feature is the head's output for its parent. Its entry is dropped at the end of the round, and an accepted
    token runs again with the target's feature.
    """

    def __init__(self, head: Eagle3):
        self.head = head
        self.aux_layers = head.reading.taps
        self.predicted = head.draft_tokens

    def begin(self, session: Session) -> None:
        tokens = session.tokens
        self.target_session = session
        self.session = session.require_layers().draft_layers_session(self.head)
        aux = session.aux_hidden(range(len(tokens)))
        if len(tokens) > 1:
            self._run_pairs(tokens[1:], aux[:, :-1])
            self.session.commit(range(len(tokens) - 1))
        self._aux_hidden, self._tokens = aux[:, -1:], tokens[:0]  # of the pending pairs; the last one has no token yet

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """See `DraftModel.extend`; every structure (shape of drafts) feeds the root first, without other tokens."""
        if self.session.rows:
            return self._run_drafted(tokens, parents)
        return self._run_pairs(torch.cat([self._tokens, tokens]), self._aux_hidden)

    def _run_pairs(self, tokens: Tensor, aux: Tensor) -> Tensor:
        """Run pairs: tokens [n], aux hidden states [1, n, taps · d]; returns the logits [1, K] after the last pair."""
        head = self.head

        def pairs_pass(x: Tensor, view: View) -> tuple[Tensor, Tensor]:
            embedding, aux = x.tensor_split([head.reading.hidden], dim=-1)
            out = head.run(embedding, head.features(aux), view.masks(), view.rotary, view.cache)
            return out, head.draft_logits(view.logit_rows(out))

        x = torch.cat([head.embed(tokens[None]), aux], dim=-1)
        out, logits = self.session.run_rows("pairs", pairs_pass, x, chain_parents(0, len(tokens)), logit_count=1)
        self._pairs = len(tokens)
        self.hidden = self._outputs = out[0, -1:].clone()  # of the root and drafted tokens; passes reuse `out`
        return logits[0, -1:]

    def _run_drafted(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Run drafted tokens [n] under the draft's rows `parents`, whose outputs are their features; logits [n, K]."""
        head = self.head

        def drafted_pass(x: Tensor, view: View) -> tuple[Tensor, Tensor]:
            embedding, features = x.chunk(2, dim=-1)
            out = head.run(embedding, features, view.masks(), view.rotary, view.cache)
            return out, head.draft_logits(out)

        follows_last = list(parents) == [len(self._outputs) - 1]  # a slice costs less than indexing by a list
        features = self._outputs[-1:] if follows_last else self._outputs[list(parents)]
        x = torch.cat([head.embed(tokens), features], dim=-1)[None]
        row_offset = self._pairs - 1  # rows of the session before the draft's row 0, the root
        out, logits = self.session.run_rows("drafted", drafted_pass, x, [parent + row_offset for parent in parents])
        self.hidden = out[0]
        self._outputs = torch.cat([self._outputs, self.hidden])
        return logits[0]

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        aux = self.target_session.aux_hidden(rows)
        if self.session.rows:
            self.session.commit(range(self._pairs))
            self._aux_hidden, new_tokens = aux, tokens[1:]  # the root's pair has run
            self._tokens = self._tokens[:0]
        else:  # the head did not run in this round
            self._aux_hidden, new_tokens = torch.cat([self._aux_hidden, aux], dim=1), tokens
        self._tokens = torch.cat([self._tokens, torch.tensor(new_tokens, dtype=torch.long, device=self._tokens.device)])


class Eagle3Plugin(HeadPlugin[Eagle3]):
    """The model is an `Eagle3`."""

    kind, record, local_name = KIND, checkpoint.TRAINING_FILE, local_name

    def open_head(self, where: str, target: PreTrainedConfig) -> checkpoint.StoredHead:
        return checkpoint.open_head(where, target, self.changes)

    def is_in(self, folder: str) -> bool:
        return is_head(open_tensors(folder).file_of)  # its config may name a causal LM

    def export(self, where: str, target: OpenTarget, dtype: torch.dtype, folder: Path) -> None:
        stored = self.open_head(where, target.config)
        head = stored.load(dtype)
        made_here = stored.made_here and not self.changes.overrides  # trained by Outrider
        checkpoint.save_head(folder, head, "speculators", target.config, target.source, made_here=made_here)

    def draft_model(self, model: Eagle3, method: MethodConfig) -> DraftModel:
        return Eagle3DraftModel(model)

"""The counts that k-config trees of a small LM have on a text on average, without decoding it again.

Speculative sampling is lossless: after a prefix the emitted token t has the distribution p, and what follows depends on
the prefix and t alone. So plain decoding may say the text, and each node that a round visits is then conditioned on the
token that follows there. With r_1 = p, candidates from q_1, q_2, … and β_j = Σ max(q_j − r_j, 0), the probability that
candidate j is rejected, the candidate of rank i is accepted and is t with probability

    E [ Π_{j<i} β_j · min(q_i(t), r_i(t)) ],   r_{j+1} = max(r_j − q_j, 0) / β_j.

With replacement q_j = q, and nothing is random. Without, q_{j+1} is q_j without x_j, and the mean is over x_j drawn as
the rejected candidates are, from max(q_j − r_j, 0) / β_j. Divided by p(t) it is the probability given t. Naive sampling
accepts t if it is drawn: q_i(t), the earlier candidates being other tokens. Which rounds there are follows from these
numbers for any widths. What remains of chance is the text, and a few draws. Under greedy decoding the candidate of rank
i is accepted if t is the i-th likeliest of q.

Example: p = (0.5, 0.5), q = (1, 0), t = 0: min(1, 0.5) / 0.5 = 1. If the target says 0, the candidate was accepted.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.base.streams import Streams
from outrider.draft_models.targets.target import Target
from outrider.inference.core.sampling import invert
from outrider.inference.core.target_session import eager_session
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.model_plugin import without_calibration
from outrider.inference.drafters.small_lm.drafter import fit_vocabulary
from outrider.inference.settings.sampling import GREEDY, SamplingConfig
from outrider.inference.shapes.shapes import level_sizes
from papers.claims import Row
from papers.measuring import Asked, Bench, answer_of

MOST, DRAWS = 64, 2  # candidates of a node; draws of them without replacement
FEW = 8  # candidates where they repeat, or are accepted naively


def by_rank(p: Tensor, q: Tensor, said: Tensor, numbers: Tensor, *, replace: bool, naive: bool = False) -> Tensor:
    """How probable it is, given the tokens said, that the candidate of each rank is accepted [n, ranks].

    p, q [n, K]: the target's distribution and the drafter's, of the draft vocabulary; p need not sum to 1.
    said [n]: the tokens' places in it, −1 for others. numbers [n, ranks]: uniform ones, to draw with.
    """
    rows, known = torch.arange(len(said), device=said.device), (said >= 0).double()
    said = said.clamp(min=0)
    r, q, chance = p.double(), q.double(), known / (1 if naive else p[rows, said].double().clamp(min=1e-300))
    found = []
    for column in numbers.T:
        own = q[rows, said]
        found.append(chance * (own if naive else torch.minimum(own, r[rows, said])))
        rejected = q.clone().index_put_((rows, said), own * 0) if naive else (q - r).clamp(min=0)
        left = rejected.sum(-1, keepdim=True)
        chance = chance * left[:, 0]
        if not naive:
            r = (r - q).clamp(min=0) / left.clamp(min=1e-300)
        if not replace:
            q = q.scatter(-1, invert(rejected, column[:, None]).clamp(min=0), 0.0)
            q = q / q.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.stack(found, -1)


def rounds_of(accepted: np.ndarray, widths: Sequence[int], most: int) -> dict[str, float]:
    """The expected counts of a text's rounds (see `measuring.counts_of` and `watching.of_tree`).

    accepted [n, ranks]: of the tokens after the first, as `by_rank`. widths: children by level. most: the tokens that
    the text might have had. A round that begins `left` tokens before that drafts `left` − 1 levels at most.
    """
    assert max(widths) <= accepted.shape[1]
    last = len(accepted)
    found: dict[str, float] = defaultdict(float, output=1.0 + last, tokens=float(last))
    starts = np.zeros(last + 2)
    starts[0] = 1.0
    for root in range(min(last, most - 1)):
        path, levels = starts[root], widths[: most - 2 - root]
        nodes = level_sizes(levels)
        each = {"rounds": 1, "drafted": sum(nodes), "by_source": sum(nodes), "depth": len(levels)}
        each |= {"verified": 1 + sum(nodes), "verified_apart": 1 + len(levels) * (nodes[-1] if nodes else 0)}
        for name, amount in each.items():
            found[name] += path * amount
        for place, width in enumerate(levels[: last - root], root):
            own = path * accepted[place, :width]
            found["tried"] += path
            for rank, share in enumerate(own, 1):
                found[f"rank_{rank}"] += share
            starts[place + 1] += path - own.sum()
            path = own.sum()
            found["accepted"] += path
        starts[min(root + len(levels), last) + 1] += path
    found["reached"] = found["rounds"] + found["accepted"]
    return {name: round(float(amount), 5) for name, amount in found.items()}


class Expected:
    """Measures rows of k-config trees of a small LM at temperatures 0 and 1 (see `Row.measure`).

    What is known of the last prompt is used again for its other rows.
    """

    def __init__(self) -> None:
        self._asked: Asked | None = None

    def __call__(self, bench: Bench, row: Row, asked: Asked) -> Mapping[str, float]:
        """Where draws repeat, equal ones are one node: how many there are is then not known, and not counted."""
        assert row.method is not None
        if asked != self._asked:
            self._asked, self._known, self._outputs = asked, {}, None
        shape = row.method.structure
        replace, naive = shape.draw == "with_replacement", row.method.verify == "naive"
        rule = (row.sampling.temperature == 0, replace, naive)
        if rule not in self._known:
            self._known[rule] = self.accepted(bench, asked, row.sampling, replace, naive)
        counts = rounds_of(self._known[rule], shape.widths, bench.tokens)
        unknown = ("drafted", "by_source", "verified", "verified_apart") if replace else ()
        return {name: amount for name, amount in counts.items() if name not in unknown}

    def accepted(self, bench: Bench, asked: Asked, sampling: SamplingConfig, replace: bool, naive: bool) -> np.ndarray:
        """By rank, of the prompt's text [n, candidates]."""
        if sampling == GREEDY:
            _, scores, said = outputs(bench, asked, answer_of(bench, asked))
            return (scores.topk(min(MOST, scores.shape[-1])).indices == said[:, None]).double().cpu().numpy()
        assert sampling == SamplingConfig(temperature=1.0)  # p and q are raw
        self._outputs = self._outputs or outputs(bench, asked, answer_of(bench, asked, sampling))
        logits, scores, said = self._outputs
        p, q = logits.float().softmax(-1), scores.float().softmax(-1)
        small: Any = without_calibration(bench.drafters["small_lm"])
        predicted = small.predicted
        p = p if predicted is None else p[:, predicted]
        shape = (1 if replace else DRAWS, len(said), FEW if replace or naive else MOST)
        numbers = Streams(0, asked.id).arrays("candidates").random(shape)
        drawn = [by_rank(p, q, said, torch.from_numpy(own).to(p.device), replace=replace, naive=naive)
                 for own in numbers]  # fmt: skip
        return torch.stack(drawn).mean(0).cpu().numpy()


@torch.inference_mode()
def outputs(bench: Bench, asked: Asked, text: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """For the tokens of `text` after the first: the target's logits [n, V], the small LM's over its draft vocabulary
    [n, K], and the tokens' places there [n], −1 for others."""
    assert bench.stack is not None
    small: Any = without_calibration(bench.drafters["small_lm"])
    ids, vocabulary, own = (*asked.ids, *text[:-1]), bench.vocabulary, small.predicted
    logits, scores = _logits(bench.stack, ids, len(text) - 1), _logits(small, ids, len(text) - 1)
    said = torch.tensor(text[1:], device=logits.device, dtype=torch.long)
    if own is None:
        return logits, fit_vocabulary(scores, vocabulary), said
    place = said.new_full((vocabulary,), -1).index_copy_(0, own, torch.arange(len(own), device=own.device))
    return logits, scores, place[said]


def _logits(model: Target, ids: Sequence[int], count: int) -> Tensor:
    """Next-token logits [count, V] after each of the last `count` of ids."""
    session = eager_session(model, None, len(ids))
    logits = session.extend(torch.tensor(ids, device=model.device), chain_parents(0, len(ids)), max(1, count))[1]
    return logits[len(logits) - count :]

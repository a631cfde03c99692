"""The target's distributions and hidden states on a text, recorded once to judge all readings of a drafter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_models.targets.target import Target
from inference.core.decode import autoregressive
from inference.core.target_session import Runtime
from inference.core.tree import chain_parents
from inference.doctor.examinee import Recording

FIRST = 3  # the first place of a text that a head can draft as its second token


@torch.inference_mode()
def record(
    target: Target,
    prompt: Sequence[int],
    answer: Sequence[int],
    boundaries: Sequence[int],
    category: str = "",
) -> Recording | None:
    """One pass of the target over a text; None if no position of the answer can be judged.

    boundaries: layer boundaries to record, for a target that runs layer by layer. The answer's first token is never
    drafted, so it is not among the places.
    """
    text = [*prompt, *answer]
    places = tuple(range(max(len(prompt) + 1, FIRST), len(text)))
    if not places:
        return None
    logits, aux_hidden = read(target, text, len(prompt), boundaries)
    logits = logits[[place - 1 - len(prompt) for place in places]]
    # Logits computed in half precision are normalised in float32.
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    tokens = torch.tensor(text, device=target.device)
    return Recording(tokens, places, log_p, log_p.argmax(-1), aux_hidden, category)


@torch.inference_mode()
def read(
    target: Target, text: Sequence[int], start: int, boundaries: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits [n − start, V] after the tokens from position `start` on, and all hidden states [1, n, d] by boundary."""
    session = Runtime().session(target, 0, len(text))
    session.aux_layers = tuple(boundaries)
    tokens, parts = torch.tensor(text, device=target.device), []
    for begin, end in ((0, start), (start, len(text))):
        rows = range(end - begin)
        session.feed(tokens[begin:end], chain_parents(0, len(rows)))
        logits = session.finish(last_only=begin == 0)
        if boundaries:
            parts.append(session.aux_hidden(rows))
        session.commit(rows)
    if not boundaries:
        return logits, {}
    aux_hidden = torch.cat(parts, dim=1).chunk(len(boundaries), dim=-1)
    return logits, dict(zip(boundaries, aux_hidden, strict=True))


def answer_of(target: Target, prompt: Sequence[int], count: int, eos: frozenset[int]) -> list[int]:
    """The target's greedy answer to `prompt`, up to `count` tokens."""
    rounds = autoregressive(target, prompt, max_new_tokens=count, eos=eos)
    return [token for one in rounds for token in one.tokens]

"""The logits of each kind of drafter at all places of a recorded text, computed in a few passes."""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from draft_models.eagle3.model import Eagle3
from draft_models.early_exit.model import EarlyExit
from draft_models.small_lm.model import last_id
from draft_models.targets.stack import LayerStack
from draft_models.targets.target import Band, Target
from inference.doctor.examinee import Recording
from inference.doctor.recording import read

STEPS = 2  # draft steps of a head: the first reads true features, the second also one of the head's own outputs


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
    first = head.run(tokens[None, 1:], head.features(aux), past, head.rotary(index[None]), cache)
    own = places - STEPS - 1  # the entries whose outputs are the features of the second step
    true, itself = index <= own[:, None], torch.eye(len(own), dtype=torch.bool, device=tokens.device)
    positions = own + (0 if still else 1)
    masks = {}
    for window in head.windows:
        near = true if window is None else true & (positions[:, None] - index < window)
        masks[window] = torch.cat([near, itself], dim=1)[None, None]
    second = head.run(tokens[None, own + 2], first[:, own], masks, head.rotary(positions[None]), cache)
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

"""A decoding by an EAGLE-3 head that is the same test on any device."""

from collections.abc import Callable
from pathlib import Path

import torch

from outrider.base.streams import Streams
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.target_session import Runtime
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.loading.models import prepare_models
from outrider.inference.shapes.factory import make_structure
from tests.fitted_heads import fitted_head
from tests.tiny import STRUCTURES, method_of, random_prompt

TURNS = ((12, 20), (12, 20), (9, 12))  # tokens of the prompt, and new ones; the second needs no graph anew


def require_same_texts(
    path: Path, structure: str, device: torch.device, change: Callable[[Eagle3], Eagle3] = lambda head: head
) -> None:
    """Eagerly and in graphs the head of the target in `path` says the target's own text, and is right now and then.

    change: of the head, to plant a fault.
    """
    target = open_target(str(path))
    stack = target.stack(dtype=torch.float32, device=device)
    expected = {}
    for length, count in TURNS:
        rounds = autoregressive(stack, random_prompt(length), max_new_tokens=count)
        expected[length] = [token for r in rounds for token in r.tokens]
    answers = [(random_prompt(length), answer) for length, answer in expected.items()]
    head = change(fitted_head(target.stack(dtype=torch.float32), answers)).double()
    head = head.to(device, torch.float32)  # a change of dtype is a move on any device
    prepare_models(stack, {"eagle3": head})
    runtime = Graphed(16)
    runtime.prepare(40, ())
    for each in (Runtime(), runtime):
        source, method = Eagle3DraftModel(head), method_of(STRUCTURES[structure], 3)
        for turn, (length, count) in enumerate(TURNS):
            before = runtime.captures
            drafter = ModelDrafter(source, make_structure(method, Streams(0)))
            rounds = list(speculative(stack, drafter, random_prompt(length), max_new_tokens=count, runtime=each))
            assert [token for r in rounds for token in r.tokens] == expected[length]
            assert sum(r.accepted for r in rounds) >= 2
            if each is runtime and turn < 2:
                assert (runtime.captures == before) == (turn == 1)

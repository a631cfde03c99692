"""transformers' assisted generation as arms: timed and counted as this runtime's own arms are."""

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from outrider.inference.core.rounds import Generation
from outrider.inference.measure.arms import stock_attention
from outrider.inference.measure.results import Arm
from outrider.inference.serving.engine_process import to_generation
from outrider.inference.serving.engine_worker import Continuation

MAX_NGRAM = 3


@torch.inference_mode()
def assisted(
    model: PreTrainedModel, prompt: Sequence[int], settings: GenerationConfig, *, draft_tokens: int | None,
    assistant: PreTrainedModel | None,
) -> Generation:  # fmt: skip
    """`generate` with `settings`, assisted by a model, or by prompt lookup.

    draft_tokens: a constant number of draft tokens, each of them submitted; None: transformers' own schedule.

    The first tokens come from prefill and first draft together, and both are in `prefill_seconds`.
    """
    ids, seen = torch.tensor([prompt], device=model.device), Continuation()
    settings, drafting, helped = copy.deepcopy(settings), GenerationConfig(), dict[str, Any]()
    for each in (settings, drafting) if draft_tokens is not None else ():
        each.num_assistant_tokens, each.num_assistant_tokens_schedule = draft_tokens, "constant"
        each.assistant_confidence_threshold = 0.0
    if assistant is None:
        settings.prompt_lookup_num_tokens, settings.max_matching_ngram_size = draft_tokens, MAX_NGRAM
    else:
        assistant.generation_config, helped["assistant_model"] = drafting, assistant
    model.generation_config = settings
    streamer = SimpleNamespace(put=lambda new: seen.add(new.flatten().tolist()), end=lambda: None)
    with stock_attention(model), stock_attention(assistant or model):
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **helped)  # type: ignore[operator]
    return to_generation(seen.tokens[1:], [seen.times[0], *seen.times[2:]], 0)  # the first delivery is the prompt


def assisted_arms(
    model: PreTrainedModel, settings: GenerationConfig, draft_tokens: int, helpers: Mapping[str, PreTrainedModel]
) -> dict[str, Arm]:
    """Prompt lookup, and of every helper two arms: `draft_tokens` all submitted, and transformers' own schedule."""

    def arm(count: int | None, assistant: PreTrainedModel | None) -> Arm:
        return lambda prompt, _: assisted(model, prompt, settings, draft_tokens=count, assistant=assistant)

    found = {"transformers_prompt_lookup": arm(draft_tokens, None)}
    for name, helper in helpers.items():
        found |= {f"transformers_{name}": arm(draft_tokens, helper), f"transformers_{name}_default": arm(None, helper)}
    return found

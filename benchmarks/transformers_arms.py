"""transformers' `generate`, by itself and assisted, as arms: timed and counted as this runtime's own arms are."""

import copy
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.draft_models.early_exit.model import EarlyExit, NoLayer, exit_layers
from outrider.draft_models.targets.model_files import decoder_layers, final_norm
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.core.decode import cut
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure.arms import stock_attention
from outrider.inference.measure.results import Arm

MAX_NGRAM = 3


def widened(model: PreTrainedModel, tokens: Tensor, vocabulary: int) -> PreTrainedModel:
    """`model` over all of `vocabulary`: its ids 0 … k − 1 mean `tokens` [k], its id k any other.

    It proposes the same tokens. Its head has a row for every token again, most of them with a very low bias.
    """
    place = torch.full((vocabulary,), len(tokens)).index_copy(0, tokens, torch.arange(len(tokens)))
    embedding: Any = model.get_input_embeddings()
    head = _whole_head(model.get_output_embeddings(), tokens, vocabulary)
    model.config.update({"vocab_size": vocabulary, "tie_word_embeddings": False})
    model.set_input_embeddings(nn.Embedding.from_pretrained(embedding.weight[place]))
    model.set_output_embeddings(head)
    return model.requires_grad_(False)


def as_model(target: str, drafter: EarlyExit, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal LM that computes what `drafter` on `target` does. Raises `UserError` for an exit of several layers."""
    if drafter.deeper:
        raise UserError(f"--checkpoint: an exit of {len(drafter.layers)} layers; expected exit_depth=1 here")
    opened = open_target(target)
    model = opened.layers(exit_layers(opened.config, drafter.exit_layer), dtype=dtype, device=device)
    layers = decoder_layers(model)
    if isinstance(drafter.layer, NoLayer):
        del layers[-1]
        model.config.num_hidden_layers = len(layers)
    else:
        layers[-1].load_state_dict(drafter.layer.state_dict())
    final_norm(model).load_state_dict(drafter.norm.state_dict())
    if drafter.head is None:
        head: Any = model.get_output_embeddings()
        drafter.use_head(head)
    own, tokens = drafter.output_head, drafter.draft_tokens
    if drafter.head is not None or tokens is not None:
        head = copy.deepcopy(own) if tokens is None else _whole_head(own, tokens, drafter.vocabulary)
        model.set_output_embeddings(head)
    return model


def _whole_head(own: Any, tokens: Tensor, vocabulary: int) -> nn.Linear:
    """A head with a row for every token, whose first rows [k] are of `tokens`; all others get a very low bias."""
    whole = nn.Linear(own.weight.shape[1], vocabulary).to(own.weight)
    whole.weight.data.zero_()
    whole.bias.data.fill_(-1e4)
    whole.weight.data[tokens] = own.weight[: len(tokens)]
    whole.bias.data[tokens] = 0 if own.bias is None else own.bias[: len(tokens)]
    return whole.requires_grad_(False)


class _Deliveries(BaseStreamer):
    """Notes the tokens that arrive, a list per pass of the target, and when."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.tokens: list[tuple[int, ...]] = []

    def put(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())
        self.tokens.append(tuple(value.flatten().tolist()))

    def end(self) -> None:
        pass


@torch.inference_mode()
def transformers_arm(
    model: PreTrainedModel, prompt: Sequence[int], settings: GenerationConfig, *, draft_tokens: int | None = None,
    assistant: PreTrainedModel | None = None, early_exit: int | None = None, lookup: int | None = None,
) -> Generation:  # fmt: skip
    """`generate` with `settings`, plain or assisted by a model, by the target's own first layers or by prompt lookup.

    draft_tokens: a constant number of draft tokens, each of them submitted; None: transformers' own schedule.
    lookup: tokens that prompt lookup drafts.

    With assistance the first tokens come from prefill and first draft together, and both are in `prefill_seconds`.
    """
    ids = torch.tensor([prompt], device=model.device)
    settings, drafting = copy.deepcopy(settings), GenerationConfig()
    for each in (settings, drafting) if draft_tokens is not None else ():
        each.num_assistant_tokens, each.num_assistant_tokens_schedule = draft_tokens, "constant"
        each.assistant_confidence_threshold = 0.0
    if lookup is not None:
        settings.prompt_lookup_num_tokens, settings.max_matching_ngram_size = lookup, MAX_NGRAM
    model.generation_config = settings
    helped: dict[str, Any] = {}
    if assistant is not None:
        assistant.generation_config = drafting
        helped["assistant_model"] = assistant
    if early_exit is not None:
        helped["assistant_early_exit"] = early_exit
    seen = _Deliveries()
    with stock_attention(model), stock_attention(assistant or model):
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=seen, **helped)  # type: ignore[operator]
    passes, at = seen.tokens[1:], [started, *seen.at[1:]]  # the first delivery is the prompt
    ends, budget = settings.eos_token_id, settings.max_new_tokens
    return generation_of(passes, at, ends or (), budget)


def generation_of(
    passes: Sequence[Sequence[int]], at: Sequence[float], eos: Collection[int], budget: int
) -> Generation:
    """The passes of a target, the prefill first, counted as ours are.

    passes: the tokens of each. at: when it all began and when each pass was over, in seconds.
    """
    text: tuple[int, ...] = ()
    rounds = []
    for tokens, before, after in zip(passes, at, at[1:], strict=False):
        whole = cut([*text, *tokens], eos, budget)
        rounds.append(Round(whole[len(text) :], 0, 0, 0, after - before))
        text = whole
    first, *later = rounds
    return Generation(text, first.seconds, at[len(passes)] - at[1], tuple(later))


def generate_arm(model: PreTrainedModel, settings: GenerationConfig, name: str, **options: Any) -> Arm:
    """`transformers_arm` with `options`; sampling is seeded by its `name`."""

    def generate(prompt: Sequence[int], streams: Streams) -> Generation:
        with torch.random.fork_rng():
            torch.manual_seed(streams.number(name, "sample", bits=64))
            return transformers_arm(model, prompt, settings, **options)

    return generate


def assisted_arms(
    model: PreTrainedModel,
    settings: GenerationConfig,
    draft_tokens: int,
    helpers: Mapping[str, Mapping[str, Any]],
) -> dict[str, Arm]:
    """Prompt lookup, and of every helper two arms: `draft_tokens` all submitted, and transformers' own schedule.

    helpers: by name the options of `transformers_arm` that say who drafts.
    """
    asked: dict[str, dict[str, Any]] = {}
    for name, helper in helpers.items():
        asked |= {name: {**helper, "draft_tokens": draft_tokens}, f"{name}_default": dict(helper)}
    named = {f"transformers_{name}": options for name, options in asked.items()}
    named["transformers_prompt_lookup"] = {"lookup": draft_tokens}
    return {name: generate_arm(model, settings, name, **options) for name, options in named.items()}

"""Evaluation of a drafter during training, on held-out text: the metrics by which a training is judged.

`Decoding` decodes prompts with the target and the drafter, and measures τ: tokens for each pass of the target.
`HeldOutText` runs both over text once, and computes τ for drafts of `WATCHED_DRAFT` tokens from each position. A row
holds several documents. A position with a label (the next token, not IGNORE) is supervised.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor
from torch.utils.data import default_collate
from transformers import PreTrainedConfig

from outrider.base.processes import say
from outrider.base.progress import track_progress
from outrider.data_prep.text.prompts import spread_evenly
from outrider.draft_models import acceptance
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.target import Masks
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.drafter import DraftModel
from outrider.inference.core.rounds import Round, collect
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.loading.models import Drafters, prepare_models
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.measure.statistics import acceptance_by_position, decode_statistics
from outrider.inference.shapes.factory import Chain
from outrider.inference.stopping.interface import FixedLength
from outrider.train.core.training import TOP_K, Batch, Metrics, TrainRows
from outrider.train.parts.capture import TextToContinue
from outrider.train.parts.steps import WATCHED_DRAFT


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding of held-out texts, up to `new_tokens` new tokens or a token of `eos`.

    It stops at `eos` because a chat model's output after the end of its answer is irrelevant.
    """

    texts: Sequence[TextToContinue]
    new_tokens: int
    eos: Collection[int]

    @classmethod
    def of(cls, target: OpenTarget, rows: TrainRows, prompts: int, new_tokens: int, *drafter: PreTrainedConfig) -> Self:
        """`prompts` prompts, the beginnings of rows spread evenly. With the new tokens they fit the context of the
        target, and of a `drafter` that has a context of its own."""
        max_prompt_len = min(map(context_limit, (target.config, *drafter))) - new_tokens
        if len(rows) < prompts:
            say(f"decode_prompts={prompts}: {len(rows)} held-out rows are decoded, there are no more")
        chosen_rows = [rows[index] for index in spread_evenly([*range(len(rows))], prompts)]
        texts = [TextToContinue(heldout_prompt(row)[-max_prompt_len:]) for row in chosen_rows]
        return cls(texts, new_tokens, end_tokens(target))

    def answer(self, stack: LayerStack) -> Self:
        """The same with the target's greedy answers, which `measure` can replay."""
        answered_texts = []
        for text in track_progress(self.texts, "answering held-out prompts", "prompts"):
            rounds = autoregressive(stack, text.prompt, max_new_tokens=self.new_tokens, eos=self.eos)
            answered_texts.append(text._replace(answer=[*collect(rounds).tokens]))
        return replace(self, texts=answered_texts)

    def __call__(self, stack: LayerStack, model: DraftModel, drafters: Drafters = MappingProxyType({})) -> Metrics:
        """Decode with the target `stack` and drafts by `model` (see `measure`).

        drafters: modules by kind that are prepared for decoding first, with the target; none: nothing is prepared.
        """
        if drafters:
            prepare_models(stack, drafters)
        return self.measure(partial(speculative, stack), model)

    def measure(self, decode: Callable[..., Iterator[Round]], model: DraftModel) -> Metrics:
        """Decode with drafts by `model`, `WATCHED_DRAFT` tokens a round. decode: `speculative`, or `replay` of answers.

        Returns tau, the tokens for each pass of the target, its own token included; and accept_<i>, the share of
        accepted tokens among the i-th tokens of drafts.
        """
        generations = []
        for text in track_progress(self.texts, "decoding held-out prompts", "prompts"):
            drafter = ModelDrafter(model, Chain(FixedLength(WATCHED_DRAFT)))
            generations.append(collect(text.rounds(decode, drafter, self.new_tokens, self.eos)))
        accept_metrics = {f"accept_{row.position}": row.accepted for row in acceptance_by_position(generations)}
        return {"tau": decode_statistics(generations).tau, **accept_metrics}


class HeldOutText:
    """Held-out rows, `size` at a time, with the predictions of a whole `target` at the supervised positions, if any.

    choices: the target's most likely token, int64 [B, T] of each batch. acceptances: whether to keep the target's
    distributions there too, from which the acceptance probability of a drafter's distribution follows.
    """

    def __init__(self, rows: TrainRows, size: int, target: LayerStack | None = None, *, acceptances: bool = True):
        self.batches = batches_of(rows, size)
        self.choices, self.acceptances = list[Tensor](), list[acceptance.AcceptanceOf | None]()
        for batch in track_progress(self.batches, "reading held-out text", "batches"):
            acceptance_of = None
            if target is not None:
                hidden, supervised = supervised_hidden(target, batch), batch["labels"].to(target.device) != IGNORE
                likeliest, _ = acceptance.argmax_and_acceptance(target.logits_after_norm, hidden, None)  # [n]
                self.choices.append(acceptance.scatter_positions(likeliest, supervised, IGNORE))
                if acceptances:
                    acceptance_of = acceptance.acceptance_by_target(target.logits_after_norm, hidden.cpu())
            self.acceptances.append(acceptance_of)

    @torch.no_grad()
    def judge(
        self,
        logits_of: acceptance.Logits,
        states_of: Callable[[Batch], tuple[Tensor, Tensor | None]],
        target_logits_of: acceptance.Logits | None = None,
    ) -> Metrics:
        """The metrics of a drafter on the text.

        top1: the share of supervised positions at which the drafter's most likely token is the text's next token.
        top1_target: the same for the target's most likely token, if a target was given. tau_text: τ of greedy drafts
        if the target had written the text. tau_analytic: the expected τ of sampling along the text at temperature 1, if
        the target's distributions are known: from `acceptances`, from `states_of`, or a batch's top k.

        states_of: from a batch to the drafter's states [n, d] at its supervised positions and the target's states
        there, or None. logits_of, target_logits_of: from such states to logits.
        """
        guesses, accept_probs = list[Tensor](), list[Tensor]()  # [B, T] of each batch
        pairs = [*zip(self.batches, self.acceptances, strict=True)]
        for batch, acceptance_of in track_progress(pairs, "judging held-out text", "batches"):
            states, target_states = states_of(batch)
            keep = batch["labels"].to(states.device) != IGNORE
            if acceptance_of is None and target_states is not None:
                assert target_logits_of is not None
                acceptance_of = acceptance.acceptance_by_target(target_logits_of, target_states)
            elif acceptance_of is None and "tail" in batch:  # the target's cached top k
                acceptance_of = acceptance.acceptance_by_top_k(*(batch[name].to(states.device)[keep] for name in TOP_K))
            choices, batch_probs = acceptance.argmax_and_acceptance(logits_of, states, acceptance_of)
            guesses.append(acceptance.scatter_positions(choices, keep, IGNORE))
            accept_probs += [] if batch_probs is None else [acceptance.scatter_positions(batch_probs, keep, torch.nan)]
        labels = [batch["labels"].to(guess.device) for batch, guess in zip(self.batches, guesses, strict=True)]
        pairs_of_ids = zip(guesses, labels, strict=True)
        matches = [(guess == ids).float().where(ids != IGNORE, torch.nan) for guess, ids in pairs_of_ids]
        metrics = {"top1": agreement(guesses, labels)}
        for name, accept_rates in (("tau_text", matches), ("tau_analytic", accept_probs)):
            if accept_rates and (tau := expected_tau(accept_rates, self.batches)) is not None:
                metrics[name] = tau
        return metrics | ({"top1_target": agreement(guesses, self.choices)} if self.choices else {})


def load_to_decode(target: OpenTarget, dtype: torch.dtype, device: torch.device) -> LayerStack:
    """The whole target, ready to read text and to decode; on a CPU with its weights as they are stored."""
    stack = target.stack(dtype=dtype, device=device, coded=device.type == "cpu")
    prepare_models(stack, {})  # no drafters
    return stack


def batches_of(rows: TrainRows, size: int) -> list[Batch]:
    """All `rows` in batches of `size`; the last batch may be smaller."""
    row_indices = range(len(rows))
    return [default_collate([rows[i] for i in row_indices[start : start + size]]) for start in row_indices[::size]]


def heldout_prompt(row: Batch, plain_prompt_len: int = 128) -> list[int]:
    """The start of a held-out row as a prompt: up to its first answer, or `plain_prompt_len` tokens of plain text."""
    # All tokens of a plain text but its first are supervised, so its answer would start at 1.
    answer_start = int((row["labels"] != IGNORE).nonzero()[0]) + 1
    document_length = int((row["documents"] == row["documents"][0]).sum())
    prompt_end = answer_start if answer_start > 1 else max(1, min(plain_prompt_len, document_length // 2))
    return row["input_ids"][:prompt_end].tolist()


def packed_hidden(
    stack: LayerStack, input_ids: Tensor, positions: Tensor, documents: Tensor, masks: Masks | None = None
) -> Tensor:
    """A causal LM's hidden states after its last norm [B, T, d], for packed rows [B, T].

    masks: of attention; None: attention within each document.
    """
    stack.reserve(positions.shape[1])
    masks = masks or stack.packed_masks(documents)
    hidden = stack.embed(input_ids, positions)
    return stack.norm(stack.run(hidden, 0, len(stack.layers), stack.rotary(positions), masks))


@torch.no_grad()
def supervised_hidden(stack: LayerStack, batch: Batch) -> Tensor:
    """A causal LM's hidden states after its last norm [n, d] at the supervised positions of packed rows [B, T]."""
    moved = {key: batch[key].to(stack.device) for key in ("input_ids", "labels", "positions", "documents")}
    return packed_hidden(stack, moved["input_ids"], moved["positions"], moved["documents"])[moved["labels"] != IGNORE]


def agreement(guesses: Sequence[Tensor], label_batches: Sequence[Tensor]) -> float:
    """The share of positions [B, T] with a token to guess (not IGNORE) at which the guess equals it."""
    pairs = [(guess, labels.to(guess.device)) for guess, labels in zip(guesses, label_batches, strict=True)]
    right_count = sum(int(((guess == labels) & (labels != IGNORE)).sum()) for guess, labels in pairs)
    return right_count / sum(int((labels != IGNORE).sum()) for _, labels in pairs)


def expected_tau(accept_probs: Sequence[Tensor], batches: Sequence[Batch]) -> float | None:
    """The mean over the rows in `batches` of `analytic_tau`, for drafts of `WATCHED_DRAFT` tokens.

    accept_probs: [B, T] for each batch. None if there are not that many consecutive known positions anywhere.
    """
    pairs = zip(accept_probs, [batch["documents"] for batch in batches], strict=True)
    taus = torch.cat([acceptance.analytic_tau(alpha, docs.to(alpha.device), WATCHED_DRAFT) for alpha, docs in pairs])
    return taus.double().mean().item() if len(taus) else None

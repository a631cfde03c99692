"""What is watched while a drafter trains: real decoding of held-out prompts, the number that training is for."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from data_prep.text.rows import Rows
from draft_models.acceptance import Law, analytic_tau, judge, placed, whole_law
from draft_models.losses import IGNORE
from draft_models.targets.stack import LayerStack
from inference.core.decode import speculative
from inference.core.drafter import DraftModel
from inference.core.generation import collect
from inference.drafters.shaped import Shaped
from inference.measure.statistics import acceptance_by_position, decode_statistics
from inference.shapes.factory import Chain
from inference.stopping.fixed import FixedLength
from outrider.progress import counted
from train.top_k_rows import TopKRows
from train.trained_weights import trained_parameters

WATCHED_DRAFT = 4  # draft length of the τ watched while training: fixed, so that τ depends on the weights alone


def decode_metrics(
    stack: LayerStack,
    model: DraftModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos: Collection[int],
) -> dict[str, float]:
    """Greedy continuations of `prompts` by the target `stack`, drafted by `model`, `WATCHED_DRAFT` tokens a round.

    They end with a token of `eos`: what a chat model says after its answer is nothing that anyone asks for.

    tau: tokens per target pass, the bonus included.
    accept_<i>: share of the rounds that drafted an i-th token in which it was accepted.
    """
    generations = []
    for prompt in counted(prompts, "decoding held-out prompts", "prompts"):
        drafter = Shaped(model, Chain(FixedLength(WATCHED_DRAFT)))
        generations.append(collect(speculative(stack, drafter, prompt, max_new_tokens=max_new_tokens, eos=eos)))
    positions = {f"accept_{int(row['position'])}": row["accepted"] for row in acceptance_by_position(generations)}
    return {"tau": decode_statistics(generations)["tau"], **positions}


class MovedNorms:
    """norms_moved: the share of a model's trained norms that differ, in the dtype they are saved in, from their start.

    None of them moving is worth a warning: near 1, bfloat16 has steps of 0.8 %. Without any there is nothing to say.
    """

    def __init__(self, model: nn.Module, saved_dtype: torch.dtype):
        self.dtype = saved_dtype
        self.start = {name: norm.clone() for name, norm in self._norms(model).items()}

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        if not self.start:
            return {}
        now = self._norms(model)
        moved = sum(not torch.equal(norm, now[name]) for name, norm in self.start.items())
        if not moved:
            print(
                f"warning: step {step}: none of the {len(self.start)} trained norms has moved, rounded to "
                f"{self.dtype}; raise lr or train longer",
                flush=True,
            )
        return {"norms_moved": moved / len(self.start)}

    def _norms(self, model: nn.Module) -> dict[str, Tensor]:
        trained = trained_parameters(model).items()
        return {name: p.detach().to(self.dtype) for name, p in trained if p.ndim == 1 and "norm" in name}


def batches_of(rows: Rows | TopKRows, size: int) -> list[dict[str, Tensor]]:
    """All of `rows`, `size` at a time and the rest of them last."""
    numbers = range(len(rows))
    return [default_collate([rows[i] for i in numbers[start : start + size]]) for start in numbers[::size]]


def heldout_prompts(rows: Rows | TopKRows, count: int, longest: int) -> list[list[int]]:
    """The beginnings of up to `count` held-out rows as prompts of at most `longest` tokens, the last ones kept."""
    return [heldout_prompt(rows[i])[-longest:] for i in range(min(count, len(rows)))]


def heldout_prompt(row: dict[str, Tensor], length: int = 128) -> list[int]:
    """The start of a held-out row as a prompt: up to its first answer, or `length` tokens of plain text."""
    first = int((row["labels"] != IGNORE).nonzero()[0]) + 1
    document = int((row["documents"] == row["documents"][0]).sum())
    return row["input_ids"][: max(first, min(length, document // 2))].tolist()


def packed_hidden(stack: LayerStack, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
    """A causal LM's hidden states after its last norm [B, T, d], for packed rows [B, T]."""
    stack.reserve(positions.shape[1])
    masks = stack.packed_masks(positions, documents)
    hidden = stack.embed(input_ids, positions)
    return stack.norm(stack.run(hidden, 0, len(stack.layers), stack.rotary(positions), masks))


@torch.no_grad()
def supervised_hidden(stack: LayerStack, batch: dict[str, Tensor]) -> Tensor:
    """A causal LM's hidden states after its last norm [n, d] at the supervised positions of packed rows [B, T]."""
    moved = {key: batch[key].to(stack.device) for key in ("input_ids", "labels", "positions", "documents")}
    return packed_hidden(stack, moved["input_ids"], moved["positions"], moved["documents"])[moved["labels"] != IGNORE]


def target_law(stack: LayerStack, hidden: Tensor) -> Law:
    """The law of the target `stack` at positions where it has the hidden states [n, d]; they are kept on the CPU."""
    return whole_law(stack.logits_after_norm, hidden.cpu())


@torch.no_grad()
def target_choices(stack: LayerStack, labels: Tensor, hidden: Tensor) -> Tensor:
    """The target's argmax [B, T] at the supervised positions, of which `hidden` [n, d] are, IGNORE elsewhere."""
    choices, _ = judge(stack.logits_after_norm, hidden, None)
    return placed(choices, labels.to(stack.device) != IGNORE, IGNORE)


@torch.no_grad()
def judged(drafter: LayerStack, batch: dict[str, Tensor], law: Law) -> tuple[Tensor, Tensor]:
    """A small LM's argmax [B, T] at the supervised positions of packed rows, IGNORE elsewhere, and its acceptance
    [B, T] by the target's `law` there, NaN elsewhere."""
    keep = batch["labels"].to(drafter.device) != IGNORE
    choices, accepted = judge(drafter.logits_after_norm, supervised_hidden(drafter, batch), law)
    assert accepted is not None
    return placed(choices, keep, IGNORE), placed(accepted, keep, torch.nan)


def agreement(guesses: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The share of the positions [B, T] with something wanted (not IGNORE) at which the guess is that."""
    pairs = [(guess, labels.to(guess.device)) for guess, labels in zip(guesses, wanted, strict=True)]
    right = sum(int(((guess == labels) & (labels != IGNORE)).sum()) for guess, labels in pairs)
    return right / sum(int((labels != IGNORE).sum()) for _, labels in pairs)


def expected_tau(accepted: Sequence[Tensor], documents: Sequence[Tensor]) -> dict[str, float]:
    """tau_analytic: the mean over held-out text of `analytic_tau`, for drafts of `WATCHED_DRAFT` tokens.

    It is what sampling at temperature 1 would come to if it went on as the text does. accepted, documents: [B, T] each.
    Empty where the law is not known of so many positions on end.
    """
    pairs = zip(accepted, documents, strict=True)
    found = torch.cat([analytic_tau(one, owner.to(one.device), WATCHED_DRAFT) for one, owner in pairs])
    return {"tau_analytic": found.double().mean().item()} if len(found) else {}

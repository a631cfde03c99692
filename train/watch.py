"""What is watched while a drafter trains: real decoding of held-out prompts, the number that training is for."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from data_prep.text.rows import Rows
from draft_models.losses import IGNORE
from draft_models.target.stack import LayerStack
from inference.decode import speculative
from inference.drafters.interface import DraftModel
from inference.drafters.shaped import Shaped
from inference.evaluate.arms import collect
from inference.evaluate.statistics import acceptance_by_position, decode_statistics
from inference.stopping import FixedLength
from inference.structures.factory import Chain
from train.trained_weights import trained_parameters

WATCHED_DRAFT = 4  # draft length of the τ watched while training: fixed, so that τ depends on the weights alone


def decode_metrics(
    stack: LayerStack, model: DraftModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> dict[str, float]:
    """Greedy continuations of `prompts` by the target `stack`, drafted by `model`, `WATCHED_DRAFT` tokens a round.

    tau: tokens per target pass, the bonus included.
    accept_<i>: share of the rounds that drafted an i-th token in which it was accepted.
    """
    generations = []
    for prompt in prompts:
        drafter = Shaped(model, Chain(FixedLength(WATCHED_DRAFT)))
        generations.append(collect(speculative(stack, drafter, prompt, max_new_tokens=max_new_tokens)))
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


def heldout_prompts(rows: Rows, count: int, longest: int) -> list[list[int]]:
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


@torch.inference_mode()
def target_choices(stack: LayerStack, batch: dict[str, Tensor]) -> Tensor:
    """The target's argmax [B, T] at the supervised positions of packed rows, IGNORE elsewhere."""
    moved = {key: value.to(stack.device) for key, value in batch.items()}
    keep = moved["labels"] != IGNORE
    choices = moved["labels"].clone()
    hidden = packed_hidden(stack, moved["input_ids"], moved["positions"], moved["documents"])[keep]
    rule = stack.anatomy.logits
    choices[keep] = torch.cat([rule(stack.head(part)).argmax(-1) for part in hidden.split(1024)])
    return choices

"""EAGLE-3 heads and block drafters that are often right, though nothing in them was trained but the last layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.dflash.reading import BlockReading
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.eagle3.reading import Reading
from outrider.draft_models.heads.files import DRAFT_TOKENS, module_shapes
from outrider.draft_models.heads.layers import DraftHead
from outrider.draft_models.heads.sizes import HeadSizes
from outrider.draft_models.mtp.model import MtpHead
from outrider.draft_models.mtp.reading import MtpReading
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.target_session import TargetSession
from outrider.inference.core.tree import ROOT
from outrider.inference.drafters.dflash.drafter import BlockPasses
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel

STEPS = 3  # of a draft that are fitted
SURE = 4.0  # how far the logit of a token that is right is above the others


def random_weights(
    module: type[DraftHead], reading: HeadSizes, dtype: torch.dtype, scale: float = 1.0
) -> dict[str, Tensor]:
    """The same weights every time: normal matrices, of which `scale` is about the gain, and ones."""
    generator = torch.Generator().manual_seed(0)

    def made(shape: tuple[int, ...]) -> Tensor:
        if len(shape) != 2:
            return torch.ones(shape, dtype=dtype)
        return (torch.randn(shape, generator=generator) * scale * shape[-1] ** -0.5).to(dtype)

    return {name: made(shape) for name, shape in module_shapes(module, reading).items()}


@torch.inference_mode()
def fitted_head(stack: LayerStack, answers: Sequence[tuple[Sequence[int], Sequence[int]]], hidden: int = 256) -> Eagle3:
    """A random head whose logits are fitted to what the target said after prompts, so that most of a draft is right.

    answers: (prompt, answer). It shares no embedding with the target, and knows every second token and those of the
    answers. At some places the right token is its second best, or its last.
    """
    texts = [([*prompt, *answer], len(prompt)) for prompt, answer in answers]
    said = {token for _, answer in answers for token in answer}
    known = sorted({*range(0, stack.config.vocab_size, 2), *said})
    reading = Reading(
        taps=(0, 2, len(stack.layers)), target_hidden=stack.config.hidden_size, hidden=hidden, intermediate=64,
        layers=1, heads=4, key_heads=2, head_dim=16, epsilon=1e-5, activation="silu",
        vocabulary=stack.config.vocab_size, draft_vocabulary=len(known),
        rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=256, windows=(None,), own_embedding=True,
    )  # fmt: skip
    weights = random_weights(Eagle3, reading, stack.dtype)
    head = Eagle3.of(reading, {**weights, DRAFT_TOKENS: torch.tensor(known)})
    fit_logits(stack, head, texts, known)
    return remade(head, in_inference_mode=False)


@torch.inference_mode()
def fitted_mtp(stack: LayerStack, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> MtpHead:
    """A random MTP head with a matrix of logits of its own, which is fitted in the same way to all tokens."""
    config = stack.config
    reading = MtpReading(
        taps=(len(stack.layers),), target_hidden=config.hidden_size, hidden=config.hidden_size, intermediate=64,
        layers=1, heads=4, key_heads=2, head_dim=16, epsilon=1e-5, activation="silu", vocabulary=config.vocab_size,
        draft_vocabulary=config.vocab_size, rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=256,
        windows=(None,), own_head=True, output_gate=True, head_norms=True,
    )  # fmt: skip
    head = MtpHead.of(reading, random_weights(MtpHead, reading, stack.dtype, scale=2))
    head.use_target(stack)
    fit_logits(stack, head, [([*prompt, *answer], len(prompt)) for prompt, answer in answers], range(config.vocab_size))
    return head


def fit_logits(stack: LayerStack, head: Eagle3, texts: Sequence[tuple[list[int], int]], known: Sequence[int]) -> None:
    """Fit the logits of a head, over the tokens `known`, to texts, each from a place on."""
    rows, wanted = [], []
    for text, start in texts:
        for count in range(start, len(text) - STEPS - 1):
            found = hidden_of(stack, head, text[:count], text[count : count + STEPS])
            for step, output in enumerate(found):
                rows.append(head.norm(output))
                wanted.append(wanted_logits(known, text[count + step + 1], count, step))
    head.lm_head.weight.copy_(fit(rows, wanted))


def wanted_logits(known: Sequence[int], token: int, count: int, step: int) -> Tensor:
    """Logits that are right in most places."""
    place = known.index(token)
    logits = torch.zeros(len(known), dtype=torch.float64)
    logits[place] = SURE if (count + 2 * step) % 7 > 1 else -SURE
    logits[place - 1] = (SURE + 0.5) * ((count // 2 + step) % 4 == 0)
    return logits


def fit(rows: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """The matrix that gives logits like those `wanted` for `rows`."""
    given = torch.stack(rows).double()
    ridge = 1e-3 * torch.eye(len(given), dtype=torch.float64)
    return (given.T @ torch.linalg.solve(given @ given.T + ridge, torch.stack(wanted))).T


@torch.inference_mode()
def fitted_block(
    stack: LayerStack, answers: Sequence[tuple[Sequence[int], Sequence[int]]], hidden: int = 256, rank: int = 0
) -> DFlash:
    """The same of a block drafter, of one layer that slides and one that does not; rank: of a Markov head's bias."""
    texts = [([*prompt, *answer], len(prompt)) for prompt, answer in answers]
    said = {token for _, answer in answers for token in answer}
    known = sorted({*range(0, stack.config.vocab_size, 2), *said})
    reading = BlockReading(
        taps=(0, 2, len(stack.layers)), target_hidden=stack.config.hidden_size, hidden=hidden, intermediate=64,
        layers=2, heads=4, key_heads=2, head_dim=16, epsilon=1e-5, activation="silu",
        vocabulary=stack.config.vocab_size, draft_vocabulary=len(known),
        rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=256, windows=(None, 8), own_embedding=True,
        head_norms=True, block=STEPS + (rank == 0), mask_token=3, sample_from_anchor=rank > 0,
        markov_rank=rank, confidence="markov" if rank else "none",
    )  # fmt: skip
    weights = random_weights(DFlash, reading, stack.dtype)
    drafter = DFlash(reading, all_tokens=False).with_weights({**weights, DRAFT_TOKENS: torch.tensor(known)})
    assert drafter.lm_head is not None
    rows, wanted = [], []
    for text, start in texts:
        for count in range(start, len(text) - STEPS - 1):
            for step, output in enumerate(hidden_of_block(stack, drafter, text[:count], text[count])):
                bias = drafter.bias(output.new_zeros(len(known)), torch.tensor(text[count + step]))
                rows.append(output)
                wanted.append(wanted_logits(known, text[count + step + 1], count, step) - bias)
    drafter.lm_head.weight.copy_(fit(rows, wanted))
    with torch.inference_mode(False):
        copies = {name: weight.clone() for name, weight in drafter.state_dict().items()}
        return DFlash(reading, all_tokens=False).with_weights(copies)


def hidden_of_block(stack: LayerStack, drafter: DFlash, text: Sequence[int], root: int) -> Tensor:
    """The hidden states [drafted, H] of the rows that draft, after the committed `text`."""
    session = TargetSession(stack, 0, len(text) + drafter.reading.block)
    session.aux_layers = drafter.reading.taps
    source = BlockPasses(drafter)
    session.prefill(text)
    source.begin(session)
    session.commit(range(len(text)))
    masks = [drafter.reading.mask_token] * (drafter.reading.block - 1)
    source.run_pass(torch.tensor([root, *masks]))
    return source.hidden


def remade(head: Eagle3, *, in_inference_mode: bool) -> Eagle3:
    """A copy. Once it is moved, to another device or dtype, no weight made in inference mode can be used there."""
    with torch.inference_mode(in_inference_mode):
        return Eagle3.of(head.reading, {name: weight.clone() for name, weight in head.state_dict().items()})


def hidden_of(stack: LayerStack, head: Eagle3, text: Sequence[int], drafted: Sequence[int]) -> list[Tensor]:
    """What the head gives [H] after the committed `text` and each token of the path `drafted`, root first."""
    session = TargetSession(stack, 0, len(text) + len(drafted) + 1)
    session.aux_layers = head.reading.taps
    source = Eagle3DraftModel(head)
    session.prefill(text)
    source.begin(session)
    session.commit(range(len(text)))
    found = []
    for place, token in enumerate(drafted):
        source.extend(torch.tensor([token]), (place - 1 if place else ROOT,))
        found.append(source.hidden[-1])
    return found

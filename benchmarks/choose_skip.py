"""Choose the layers of a target that a draft skips (`methods.NAME.skip`), by answers of the target.

    python benchmarks/choose_skip.py --target T --prompts questions.jsonl --out skip.json

The measure is how often the first token of a draft is right, over all positions of the target's greedy answers. First
each layer is skipped alone. Then layers are added to the skipped set one by one: of the four layers that cost least
alone, the one that costs least together with those skipped already. The chosen set has the largest ratio of expected
tokens to cost of a round, at its best draft length. The cost of a pass is the number of weights that it reads.

Zhang et al. (arXiv 2309.08168) search over attention and feed-forward parts by Bayesian optimisation of the speed.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.base.files import write_json
from outrider.commands.ending import report_errors
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.prompts import read_prompts
from outrider.draft_models.targets.open_target import open_target, pick_device, pick_dtype
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.decode import autoregressive
from outrider.inference.core.target_session import TargetSession

LONGEST = 10  # tokens of a draft
WIDTH = 4  # layers that are tried before the next one is left out


class Answer:
    """A text of the target, and the keys and values of its layers.

    prompt, answer: token ids, both not empty. The answer is the target's greedy one.
    """

    @torch.inference_mode()
    def __init__(self, stack: LayerStack, prompt: Sequence[int], answer: Sequence[int]):
        self.stack = stack
        self.answer = torch.tensor(answer, device=stack.device)
        text = torch.tensor([*prompt, *answer], device=stack.device)[:-1]
        self.tokens = text[len(prompt) - 1 :]
        self.positions = torch.arange(len(prompt) - 1, len(text), device=stack.device)
        session = TargetSession(stack, 0, len(text) + 1)
        session.prefill(text.tolist())
        session.commit(range(len(text)))
        self.remembered = session.second_cache.content()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """The interface of a cache: the keys and values of the whole target, followed by those of the rows."""
        keys, values = self.remembered[layer_idx]
        return torch.cat([keys, key], dim=-2), torch.cat([values, value], dim=-2)

    def _mask(self, window: int | None) -> Tensor:
        """[1, 1, rows, text + rows]: a row attends to the text before it and to itself."""
        before = self.positions[:, None] - torch.arange(int(self.positions[-1]) + 1, device=self.positions.device)
        seen = (before > 0) & (before < (window or len(before[0]) + 1))
        own = torch.eye(len(self.positions), dtype=torch.bool, device=seen.device)
        mask = torch.zeros(len(own), seen.shape[1] + len(own), dtype=self.stack.dtype, device=seen.device)
        return mask.masked_fill_(~torch.cat([seen, own], dim=1), torch.finfo(mask.dtype).min)[None, None]

    @torch.inference_mode()
    def right_without(self, skip: Iterable[int]) -> int:
        """The positions at which a draft without the layers `skip` begins with the target's token."""
        stack, skipped = self.stack, set(skip)
        hidden = stack.embed(self.tokens[None], self.positions[None])
        rotary = stack.rotary(self.positions[None])
        masks = {window: self._mask(window) for window in set(stack.windows)}
        for layer in range(len(stack.layers)):
            if layer not in skipped:
                hidden = stack.run(hidden, layer, layer + 1, rotary, masks, self)
        return int((stack.logits(hidden)[0].argmax(-1) == self.answer).sum())


def tokens_per_cost(share: float, cost: float) -> tuple[float, int]:
    """The largest ratio of expected tokens to cost (in passes of the target) of a round, and its draft length.

    share: of drafted tokens that are right. cost: of a draft's pass (Leviathan et al., arXiv 2211.17192, theorem 3.8).
    """
    lengths = range(1, LONGEST + 1)
    return max((sum(share**i for i in range(length + 1)) / (1 + length * cost), length) for length in lengths)


def choose(stack: LayerStack, answers: Sequence[Answer]) -> dict[str, Any]:
    """The layers to skip, and the measurements. The target needs at least two layers."""
    places = sum(len(answer.answer) for answer in answers)
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in stack.layers]
    head = sum(weight.numel() for weight in stack.head.parameters())

    def share(skip: Sequence[int]) -> float:
        return sum(answer.right_without(skip) for answer in answers) / places

    alone = [share([layer]) for layer in range(len(sizes))]
    order = sorted(range(len(sizes)), key=lambda layer: (-alone[layer], layer))
    tried: list[dict[str, Any]] = []
    skip: list[int] = []
    for _ in range(len(sizes) - 1):
        shares = {layer: share([*skip, layer]) if skip else alone[layer] for layer in order[:WIDTH]}
        next_one, right = max(shares.items(), key=lambda tested: tested[1])
        order.remove(next_one)
        skip = sorted([*skip, next_one])
        cost = 1 - sum(sizes[layer] for layer in skip) / (sum(sizes) + head)
        gain, length = tokens_per_cost(right, cost)
        tried.append({"skip": skip, "right": right, "cost": cost, "tokens_per_cost": gain, "draft_length": length})
    best = max(tried, key=lambda one: one["tokens_per_cost"])
    return {"skip": best["skip"], "best": best, "right_without_each": alone, "tried": tried, "places": places}


def choose_for(target: str, prompts: str, beside: int, count: int, tokens: int) -> dict[str, Any]:
    """`choose` on answers of `tokens` tokens to `count` prompts that an evaluation of `beside` prompts does not use.

    If there are no others it uses the same ones and sets "own_prompts" to false. Raises `UserError`.
    """
    opened = open_target(target)
    device = pick_device("auto")
    stack = opened.stack(dtype=pick_dtype("auto", opened.config, device), device=device)
    taken = {prompt.id for prompt in read_prompts(prompts, limit=beside)} if beside else set()
    others = [prompt for prompt in read_prompts(prompts, limit=4 * (beside + count)) if prompt.id not in taken]
    chosen = others[:: max(1, len(others) // count)][:count] or read_prompts(prompts, limit=count)
    answers = []
    for prompt in chosen:
        ids = render_prompt(prompt.messages(prompt.turns[:1]), opened.tokenizer, "auto" if prompt.chat else "none")
        answer = [token for r in autoregressive(stack, ids, max_new_tokens=tokens) for token in r.tokens]
        answers.append(Answer(stack, ids, answer))
    return {**choose(stack, answers), "own_prompts": bool(others), "prompts": [prompt.id for prompt in chosen]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", default="python_stdlib", help="as of evaluate-checkpoint")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with report_errors():
        found = choose_for(options.target, options.prompts, 0, options.num_prompts, options.tokens)
    write_json(options.out, found)
    print(f"skip=[{','.join(map(str, found['skip']))}] right={found['best']['right']:.2f} of {found['places']} places")


if __name__ == "__main__":
    main()

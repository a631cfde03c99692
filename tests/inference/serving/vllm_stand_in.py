"""A stand-in for vLLM's runner: it keeps a batch as vLLM does, and calls a proposer as vLLM does.

Requests lie in slots of one array of texts. In a step a request is prefilling still and is given nothing, or what the
target accepts of its draft, and one token more, is written after its text. Then the proposer is asked. Where a request
ends, the last slot's moves to its place, and what stood in rows and beyond lengths stays there, as garbage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

NOTHING_YET = -7  # rows begin as garbage, which nobody may read


def vllm_config(tokens: int, longest: int, vocabulary: int) -> Any:
    """As much of a `VllmConfig` as a proposer may ask for."""
    model = SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: vocabulary)
    return SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=tokens), model_config=model)


@dataclass
class Request:
    """answer: what the target says after `prompt`. prefill: steps before its first token."""

    prompt: Sequence[int]
    answer: Sequence[int]
    prefill: int = 0
    said: int = 0
    draft: list[int] = field(default_factory=list)
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)  # by the tokens said before


class Runner:
    """Requests come one a step where `slots` are free. pad: what is sampled is filled up with −1 to one width."""

    def __init__(self, proposer: Any, waiting: Sequence[Request], slots: int, longest: int, *, pad: bool = False):
        self.proposer, self.waiting, self.pad = proposer, list(waiting), pad
        self.token_ids_cpu = np.full((slots, longest), NOTHING_YET, np.int32)
        self.num_tokens_no_spec = np.zeros(slots, np.int32)
        self.batch: list[Request] = []

    def run(self, seen: Callable[[], None] = lambda: None) -> None:
        """Until all requests have ended. seen: called after every step."""
        while self.waiting or self.batch:
            if self.waiting and len(self.batch) < len(self.token_ids_cpu):
                self._place(len(self.batch), self.waiting.pop(0))
            self._step()
            seen()
            for slot in [slot for slot, one in enumerate(self.batch) if one.said == len(one.answer)][::-1]:
                self._end(slot)

    def _place(self, slot: int, request: Request) -> None:
        self.batch.append(request)
        self.token_ids_cpu[slot, : len(request.prompt)] = request.prompt
        self.num_tokens_no_spec[slot] = len(request.prompt)

    def _step(self) -> None:
        sampled = [self._sampled(request) for request in self.batch]
        for slot, tokens in enumerate(sampled):
            start = self.num_tokens_no_spec[slot]
            self.token_ids_cpu[slot, start : start + len(tokens)] = tokens
            self.num_tokens_no_spec[slot] += len(tokens)
        width = max(map(len, sampled)) if self.pad else 0
        drafts = self.proposer.propose(
            sampled_token_ids=[[*tokens, *[-1] * (width - len(tokens))] for tokens in sampled],
            num_tokens_no_spec=self.num_tokens_no_spec,
            token_ids_cpu=self.token_ids_cpu,
            slot_mappings=None,
        )
        assert len(drafts) == len(self.batch)
        for request, tokens, draft in zip(self.batch, sampled, drafts, strict=True):
            request.draft = draft
            if tokens:
                request.drafts.append((request.said, draft))
            else:
                assert draft == []

    @staticmethod
    def _sampled(request: Request) -> list[int]:
        """The accepted tokens of its draft and one more, as far as the answer goes."""
        if request.prefill:
            request.prefill -= 1
            return []
        left = list(request.answer[request.said :])
        accepted = 0
        while accepted < min(len(request.draft), len(left) - 1) and request.draft[accepted] == left[accepted]:
            accepted += 1
        request.said += accepted + 1
        return left[: accepted + 1]

    def _end(self, slot: int) -> None:
        last = self.batch.pop()
        if slot < len(self.batch):
            self.batch[slot] = last
            length = self.num_tokens_no_spec[len(self.batch)]
            self.token_ids_cpu[slot, :length] = self.token_ids_cpu[len(self.batch), :length]
            self.num_tokens_no_spec[slot] = length

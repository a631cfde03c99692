"""A serving engine that runs already, as an arm of an evaluation: it continues prompts, and counts its rounds."""

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from outrider.base.errors import UserError, require
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.model_spec import context_limit
from outrider.inference.batch.client import ReplyError, ask_together, bounded_parts
from outrider.inference.batch.server import RETOKENISED, Json, Streamed, TargetServer
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.core.rounds import Generation
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.report.types import UNREAD
from outrider.inference.serving.engine_process import to_generation
from outrider.inference.settings.engine import EngineConfig

_COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens(?:_per_pos)?)(?:_total)?(\{.*\})? (\S+)$", re.M)


class DraftCounters(NamedTuple):
    """vLLM's counters since its start: drafts, their accepted tokens, and these by the token's index in its draft."""

    drafts: int
    accepted: int
    accepted_at: Counter[int]


class EngineServer:
    """Continues prompts as an `EngineProcess`, which runs an engine itself, does.

    counts: of the rounds of the last prompts, by vLLM's /metrics. Example: (10, 8, 5), of 10 rounds 8 accepted at least
    one drafted token, 5 at least two. None if the generations have the rounds themselves: a chunk of the stream is a
    round, or llama.cpp's timings name the rounds. Empty if the server tells neither.
    warm: the concurrency for which it was last warmed up.
    """

    def __init__(self, config: EngineConfig, setup: TargetSetup, option: str, drafted: int) -> None:
        """option: names its URL. drafted: the tokens of a draft, 0 without a drafter. Raises `UserError` for a server
        that is not there, does not stream, or has another model or length of drafts."""
        self.warm, self.option, url = 0, option, getattr(config, option)
        self.counts: tuple[int, ...] | None = None
        settings = GenerateConfig(
            target=setup.target.source, server=url, server_model=config.server_model,
            data=DataConfig(), greedy_tokens=0, temperature=config.sampling.temperature,
        )  # fmt: skip
        model_limits, tokenizer = (context_limit(setup.target.config), setup.config.vocab_size), setup.tokenizer
        self._server = TargetServer(settings, tokenizer, setup.eos, *model_limits, checked=False, option=option)
        # 4 tokens with seed 0 tell the engine's version, and whether its token ids are those of this tokenizer.
        answer, *_, reply = self._server.stream(tokenizer("Hello", add_special_tokens=False)["input_ids"] or [0], 4, 0)
        owned_by, fingerprint = self._server.owner, str(reply.get("system_fingerprint") or "")
        self.version = fingerprint if fingerprint.startswith(owned_by) else f"{owned_by} {fingerprint}".strip()
        text, decoded = reply["choices"][0]["text"], tokenizer.decode([*answer.tokens], skip_special_tokens=True)
        is_same = text.strip("\ufffd ") == str(decoded).strip("\ufffd ")  # a stream may omit an incomplete character
        require(is_same, option, url, f"a server of {setup.target.source}: what it calls {text!r} is {decoded!r} there")
        counters = self._read_counters()
        server_len = drafted if counters is None else len(counters.accepted_at)
        require(server_len == drafted, option, url, f"a server that drafts {drafted} tokens: this one {server_len}")

    def continue_prompts(
        self, prompts: Sequence[Sequence[int]], request: Json, draft_len: int
    ) -> tuple[tuple[Generation, ...], float]:
        """A generation for each prompt, and the seconds of all together. request: max_new_tokens, eos, sampling, seeds,
        concurrency. A chunk of the stream counts as a round, though it may have several. Raises `UserError`."""

        def ask(prompt: Sequence[int], seed: int) -> Streamed:
            extra_fields = {**({} if request["eos"] else {"ignore_eos": True}), **request["sampling"]}
            return self._server.stream([*prompt], request["max_new_tokens"], seed % 2**31, **extra_fields)

        old_counters, started = self._read_counters(), time.perf_counter()
        requests = [partial(ask, prompt, seed) for prompt, seed in zip(prompts, request["seeds"], strict=False)]
        answers = ask_together(requests, request["concurrency"])
        seconds, texts = time.perf_counter() - started, tuple(_generation(answer, draft_len) for answer in answers)
        self.counts = self._count_rounds(old_counters, [reply for *_, reply in answers], draft_len, texts)
        return texts, seconds

    def _read_counters(self) -> DraftCounters | None:
        """vLLM's counters, from its /metrics; None for other servers."""
        try:
            metrics = self._server.client.fetch(
                "/metrics", read=lambda response: b"".join(bounded_parts(response)).decode()
            )
            totals, accepted_at = Counter[str](), Counter[int]()
            for name, labels, value in _COUNTER.findall(metrics):
                if position_match := re.search(r'position="(\d+)"', labels):
                    accepted_at[int(position_match[1])] += int(float(value))
                else:
                    totals[name] += int(float(value))
        except (UserError, ReplyError, ValueError, OverflowError):  # a server need not have that page
            return None
        return DraftCounters(totals["drafts"], totals["accepted_tokens"], accepted_at) if "vllm:" in metrics else None

    def _count_rounds(
        self, old_counters: DraftCounters | None, replies: Sequence[Json], draft_len: int, texts: Sequence[Generation]
    ) -> tuple[int, ...] | None:
        """`counts` of the replies. Raises `UserError` for counts that contradict the texts."""
        new_counters, url = self._read_counters(), self._server.client.url
        if old_counters is None or new_counters is None:  # llama.cpp's last chunk has totals in any case: no rounds
            has_rounds = any(timing.get("draft_n") for reply in replies for _, timing in reply["timings"][:-1])
            require(draft_len > 0 or not has_rounds, self.option, url, "a server without a drafter")
            return None if has_rounds else ()
        drafts, accepted = new_counters.drafts - old_counters.drafts, new_counters.accepted - old_counters.accepted
        by_depth = [new_counters.accepted_at[depth] - old_counters.accepted_at[depth] for depth in range(draft_len)]
        n = sum(len(text.tokens) - 1 for text in texts)  # without each text's first token, which is in no round
        # A round emits its accepted tokens and one of the target's, so there are n − accepted; vLLM counts only those
        # with a draft. The last round of a text may be cut off, so vLLM's counts may include `draft_len` more tokens.
        counts = (max(drafts, n - accepted), *by_depth)
        is_sound = sum(by_depth) == accepted and drafts + accepted <= n + draft_len * len(texts)
        is_decreasing = list(counts) == sorted(counts, reverse=True) and (draft_len > 0 or not accepted)
        expected = f"counts that {n} tokens in drafts of {draft_len} can have, and no other client meanwhile: {counts}"
        require(is_sound and is_decreasing, self.option, url, expected)
        has_rounds = drafts == sum(len(text.rounds) for text in texts) > 0  # a chunk was a round
        return None if has_rounds else counts


def _generation(streamed: Streamed, draft_len: int) -> Generation:
    """The streamed text; its `totals` have 1.0 for each flag that holds."""
    answer, steps, times, _ = streamed
    flags = {"retokenised": answer.retokenised, UNREAD: answer.failure == RETOKENISED}
    return replace(to_generation(steps, times, draft_len), totals={name: 1.0 for name, holds in flags.items() if holds})

"""An arm of an evaluation in a server that runs already: its streamed answers, and what it says of its drafts."""

import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from outrider.base.errors import UserError, require
from outrider.base.settings import construct
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.model_spec import context_limit
from outrider.inference.batch.client import ReplyError, bounded
from outrider.inference.batch.server import RETOKENISED, Json, Server, Streamed
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.core.rounds import Generation
from outrider.inference.loading.targets import TargetSetup
from outrider.inference.report.served import UNREAD
from outrider.inference.serving.engine_process import generation
from outrider.inference.settings.engine import EngineConfig

_COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens(?:_per_pos)?)(?:_total)?(\{.*\})? (\S+)$", re.M)
Told = Counter[str | int] | None


class EngineServer:
    """Continues prompts as an `EngineProcess` does.

    counts: of the last prompts, rounds and how many accepted 1, 2, … drafted tokens (vLLM's /metrics), None where each
    round came by itself; or drafted tokens and how many were accepted (llama.cpp's answers); empty if it says neither.
    """

    def __init__(self, config: EngineConfig, setup: TargetSetup, option: str, drafted: int) -> None:
        """option: names its URL. drafted: the tokens of a draft, 0 without a drafter.

        Raises `UserError` for a server that is not there, does not stream, or has another model or length of drafts.
        """
        self.warm, self.named, url = 0, option, getattr(config, option)
        self.counts: tuple[int, ...] | None = None
        asked = GenerateConfig(
            target=setup.target.source, server=url, server_model=config.server_model,
            data=DataConfig(), greedy_tokens=0, temperature=config.sampling.temperature,
        )  # fmt: skip
        context, tokenizer = context_limit(setup.target.config), setup.tokenizer
        vocabulary = setup.config.vocab_size
        self._server = Server(asked, tokenizer, setup.eos, context, vocabulary, checked=False, option=option)
        answer, *_, reply = self._server.stream(tokenizer("Hello", add_special_tokens=False)["input_ids"] or [0], 4, 0)
        owner, own = self._server.owner, str(reply.get("system_fingerprint") or "")
        self.version = own if own.startswith(owner) else f"{owner} {own}".strip()
        said, read = reply["choices"][0]["text"], tokenizer.decode([*answer.tokens], skip_special_tokens=True)
        same = said.strip("\ufffd ") == str(read).strip("\ufffd ")  # a stream may leave out what is not whole
        expected = f"a server of {setup.target.source}: what it calls {said!r} is {read!r} there"
        require(same, option, url, expected)
        told = self._told()
        length = drafted if told is None else sum(isinstance(key, int) for key in told)
        require(length == drafted, option, url, f"a server that drafts {drafted} tokens: this one {length}")

    def continued(
        self, prompts: Sequence[Sequence[int]], asked: Json, drafted: int
    ) -> tuple[tuple[Generation, ...], float]:
        """As `EngineProcess.continued`. A round is what came together, so several may be one. Raises `UserError`."""

        def ask(prompt: Sequence[int], seed: int) -> Streamed:
            more = {**({} if asked["eos"] else {"ignore_eos": True}), **asked["sampling"]}
            return self._server.stream([*prompt], asked["max_new_tokens"], seed % 2**31, **more)

        before, started = self._told(), time.perf_counter()
        with ThreadPoolExecutor(asked["concurrency"]) as pool:
            answers = [*pool.map(ask, prompts, asked["seeds"])]
        seconds, texts = time.perf_counter() - started, tuple(_generation(answer, drafted) for answer in answers)
        self.counts = self._count(before, [reply for *_, reply in answers], drafted, texts)
        return texts, seconds

    def _told(self) -> Told:
        """vLLM's counters since it began, by name and by place of an accepted token; None of other servers."""
        try:
            text = self._server.client.fetch("/metrics", read=lambda response: b"".join(bounded(response)).decode())
            found = Counter[str | int]()
            for name, labels, value in _COUNTER.findall(text):
                place = re.search(r'position="(\d+)"', labels)
                found[int(place[1]) if place else name] += int(float(value))
        except (UserError, ReplyError, ValueError, OverflowError):  # a server need not have that page
            return None
        return found if "vllm:" in text else None

    def _count(
        self, before: Told, replies: Sequence[Json], drafted: int, texts: Sequence[Generation]
    ) -> tuple[int, ...] | None:
        """`counts` of the replies. Raises `UserError` for those that no such texts can have."""
        after, rounds, said = self._told(), 0, sum(len(text.tokens) - 1 for text in texts)
        if before is None or after is None:
            timings = [one for reply in replies if isinstance(one := reply.get("timings"), dict)]
            told = {key: [one.get(key, 0) for one in timings] for key in ("draft_n", "draft_n_accepted")}
            counts = tuple(sum(construct(list[int], row, f"{self.named}: {key}")) for key, row in told.items())
            counts, accepted = counts if any(counts) else (), sum(counts[1:])
        else:
            after.subtract(before)
            rounds, accepted = after["drafts"], after["accepted_tokens"]
            counts = (max(rounds, said - accepted), *(after[place] for place in range(drafted)))  # some without drafts
        possible = said + drafted * len(texts)  # of the last round of each the end may be cut off
        sound = sum(counts[1:]) == accepted and rounds + accepted <= possible and (drafted > 0 or not accepted)
        expected = f"counts that {said} tokens in drafts of {drafted} can have, and no other client meanwhile: {counts}"
        require(sound and list(counts) == sorted(counts, reverse=True), self.named, self._server.client.url, expected)
        return None if rounds == sum(len(text.rounds) for text in texts) > 0 else counts


def _generation(streamed: Streamed, drafted: int) -> Generation:
    answer, steps, times, _ = streamed
    flags = {"retokenised": answer.retokenised, UNREAD: answer.failure == RETOKENISED}
    return replace(generation(steps, times, drafted), totals={name: 1.0 for name, holds in flags.items() if holds})

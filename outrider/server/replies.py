"""Replies of OpenAI's API: the pieces of texts become records in JSON, each in the thread of its text.

If token ids are asked for, choices also have `prompt_token_ids`, `token_ids`, and `drafted`: for each token whether the
drafter proposed it.
"""

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.inference.core.logprobs import TokenScores
from outrider.server.records import ChatRequest, CompletionRequest, Json
from outrider.server.workers import Piece, TextJob

LEAST = -9999.0  # of log-probabilities, as OpenAI's: JSON has no infinity
ScoredPiece = tuple[Piece, list[tuple[str, ...]]]  # a piece, and its log-probabilities as JSON, a row a token


class Reply:
    """The records of one answer. model: its name here. names: of its tokens, in JSON.

    The thread of each text calls `take` or `chunk`. The other methods follow the last piece.
    """

    def __init__(self, request: CompletionRequest, jobs: Sequence[TextJob], model: str, names: Callable[[int], str]):
        self._request, self._jobs, self._names = request, jobs, names
        self._chat = isinstance(request, ChatRequest)
        self._prompt = sum(len(job.ids) for job in jobs[:: request.n or 1])  # tokens, of each prompt once
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._begun = set[int]()  # choices that have a record
        self._parts: dict[int, list[ScoredPiece]] = {index: [] for index in range(len(jobs))}
        self._counts, self._began, self._ended = [Counter[str]() for _ in jobs], 0.0, 0.0

    def take(self, index: int, piece: Piece) -> str:
        """Add a piece of the choice `index` to an answer that is sent whole. Nothing is to be sent now."""
        self._count(index, piece)
        self._parts[index].append((replace(piece, scores=()), self._scores(piece)))
        return ""

    def chunk(self, index: int, piece: Piece) -> str:
        """The event of a piece that has come in a stream; empty if it has nothing."""
        self._count(index, piece)
        if not (piece.text or piece.reason or piece.scores or (piece.tokens and self._request.return_token_ids)):
            return ""
        return self._event([self._choice(index, [(piece, self._scores(piece))], "delta")])

    def body(self) -> bytes:
        """The answer, once all pieces are there."""
        choices = [self._choice(index, parts, "message") for index, parts in self._parts.items()]
        return self._record("chat.completion", choices, self._usage()).encode()

    def counts(self) -> str:
        """The last event of a stream, with its usage; empty unless it is asked for."""
        options = self._request.stream_options
        return self._event([], self._usage()) if options and options.include_usage else ""

    def figures(self) -> dict[str, float]:
        """What is measured so far: τ, and the tokens a second, are of the passes after the first of each text."""
        total, seconds = sum(self._counts, Counter[str]()), max(self._ended - self._began, 1e-9)
        figures: dict[str, float] = {"prompt_tokens": self._prompt, "tokens": total["tokens"]}
        if later := total["tokens"] - sum(counts["tokens"] > 0 for counts in self._counts):
            figures |= {"tau": round(later / total["passes"], 2), "tokens_per_second": round(later / seconds, 1)}
        return figures

    def _count(self, index: int, piece: Piece) -> None:
        self._ended, size = time.perf_counter(), len(piece.tokens)
        self._began = self._began or self._ended
        counts = {"tokens": size, "accepted": size * piece.drafted, "proposed": piece.proposed, "passes": piece.passes}
        self._counts[index].update(counts)

    def _event(self, choices: Sequence[str], more: Json | None = None) -> str:
        return f"data: {self._record('chat.completion.chunk', choices, more or {})}\n\n"

    def _record(self, kind: str, choices: Sequence[str], more: Json) -> str:
        record = self._head | {"object": kind if self._chat else "text_completion"} | more
        return f'{json.dumps(record)[:-1]}, "choices": [{", ".join(choices)}]}}'

    def _usage(self) -> Json:
        total, prompt = sum(self._counts, Counter[str]()), self._prompt
        tokens, accepted = total["tokens"], total["accepted"]
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": total["proposed"] - accepted}
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return {"usage": {**counts, "completion_tokens_details": details}}

    def _choice(self, index: int, parts: Sequence[ScoredPiece], key: str) -> str:
        """The record of a choice, or of a part of it. key: of its message."""
        job, first, text = self._jobs[index], index not in self._begun, "".join(piece.text for piece, _ in parts)
        self._begun.add(index)
        role = {"role": "assistant"} if first else {}
        content: Json = {key: role | {"content": text}} if self._chat else {"text": text}
        choice: Json = {"index": index, **content, "finish_reason": parts[-1][0].reason}
        if self._request.return_token_ids:
            choice["token_ids"] = [token for piece, _ in parts for token in piece.tokens]
            choice["drafted"] = [piece.drafted for piece, _ in parts for _ in piece.tokens]
            choice |= {"prompt_token_ids": job.ids} if first else {}
        columns = ("content",) if self._chat else ("tokens", "token_logprobs", "top_logprobs")
        lists = [", ".join(row[column] for _, rows in parts for row in rows) for column in range(len(columns))]
        members = ", ".join(f'"{name}": [{items}]' for name, items in zip(columns, lists, strict=True))
        return f'{json.dumps(choice)[:-1]}, "logprobs": {"null" if job.logprobs is None else f"{{{members}}}"}}}'

    def _scores(self, piece: Piece) -> list[tuple[str, ...]]:
        """Log-probabilities of its tokens, as chat completions have them, or as completions do, in three columns."""
        row = self._entry if self._chat else self._row
        return [row(token, scores) for token, scores in zip(piece.tokens, piece.scores, strict=False)]

    def _row(self, token: int, scores: TokenScores) -> tuple[str, ...]:
        """The token's name, its log-probability, and the top list, in which the token stands too."""
        top = {self._name(key): value for key, value in scores.top.items()} | {self._name(token): scores.logprob}
        members = ", ".join(f"{name}: {max(value, LEAST)}" for name, value in top.items())
        return self._name(token), str(max(scores.logprob, LEAST)), f"{{{members}}}"

    def _entry(self, token: int, scores: TokenScores) -> tuple[str, ...]:
        first, *top = (
            f'"token": {self._name(key)}, "logprob": {max(value, LEAST)}, "bytes": null'
            for key, value in ((token, scores.logprob), *scores.top.items())
        )
        return (f'{{{first}, "top_logprobs": [{", ".join(f"{{{member}}}" for member in top)}]}}',)

    def _name(self, token: int) -> str:
        return f'"token_id:{token}"' if self._request.return_tokens_as_token_ids else self._names(token)

"""Replies of OpenAI's API: the pieces of texts become JSON, each piece in the thread of its text. A choice: a text.

    take(index, piece)     adds a piece to an answer that is sent whole; `body` is the whole answer
    chunk(index, piece)    the event of a piece in a stream; `usage_event` is the last event of the stream

Log-probabilities are written as JSON when their piece comes, and the other records are put around them as text: a token
may have 128 of them. A choice of a chat completion, and of a completion:

    {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop",
     "logprobs": {"content": [{"token": "Hi", "logprob": -0.1, "bytes": null, "top_logprobs": []}]}}
    {"index": 0, "text": "Hi", "finish_reason": "stop",
     "logprobs": {"tokens": ["Hi"], "token_logprobs": [-0.1], "top_logprobs": [{"Hi": -0.1}]}}

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

MIN_LOGPROB = -9999.0  # the least log-probability that is sent, as OpenAI's: JSON has no infinity
ScoreRow = tuple[str, ...]  # a token's log-probabilities as JSON: an entry of "content", or of each of three lists
ScoredPiece = tuple[Piece, list[ScoreRow]]


class Reply:
    """The records of one answer. model: its name for clients. token_name: the JSON of a token's text.

    The thread of each text calls `take` or `chunk`. The other methods are called after the last piece.
    """

    def __init__(
        self, request: CompletionRequest, jobs: Sequence[TextJob], model: str, token_name: Callable[[int], str]
    ):
        self.request, self.jobs, self._token_name = request, jobs, token_name
        self._is_chat = isinstance(request, ChatRequest)
        self._prompt_tokens = sum(len(job.ids) for job in jobs[:: request.n or 1])  # of each prompt once
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._opened = set[int]()  # choices with a record: only the first has the role, and the prompt's ids
        self._parts: dict[int, list[ScoredPiece]] = {index: [] for index in range(len(jobs))}
        self._counts = [Counter[str]() for _ in jobs]
        self._first_time = self._last_time = 0.0  # of a piece, in seconds

    def take(self, choice_index: int, piece: Piece) -> str:
        """Add a piece of the choice `choice_index` to an answer that is sent whole. Nothing is to be sent now."""
        self._count(choice_index, piece)
        self._parts[choice_index].append((replace(piece, scores=()), self._scores(piece)))
        return ""

    def chunk(self, choice_index: int, piece: Piece) -> str:
        """The event of a piece of the choice `choice_index` in a stream; empty if the piece has nothing to send."""
        self._count(choice_index, piece)
        if not (piece.text or piece.reason or piece.scores or (piece.tokens and self.request.return_token_ids)):
            return ""
        return self._event([self._choice(choice_index, [(piece, self._scores(piece))], "delta")])

    def body(self) -> bytes:
        choice_jsons = [self._choice(index, scored_pieces, "message") for index, scored_pieces in self._parts.items()]
        return self._record("chat.completion", choice_jsons, self._usage()).encode()

    def usage_event(self) -> str:
        """The last event of a stream, with its usage; empty unless it is asked for."""
        options = self.request.stream_options
        return self._event([], self._usage()) if options and options.include_usage else ""

    def figures(self) -> dict[str, float]:
        """What is measured so far. τ and tokens per second leave out the first pass of each text, the prefill."""
        totals, seconds = sum(self._counts, Counter[str]()), max(self._last_time - self._first_time, 1e-9)
        figures: dict[str, float] = {"prompt_tokens": self._prompt_tokens, "tokens": totals["tokens"]}
        if decoded := totals["tokens"] - sum(counts["tokens"] > 0 for counts in self._counts):  # a prefill gives one
            figures |= {"tau": round(decoded / totals["passes"], 2), "tokens_per_second": round(decoded / seconds, 1)}
        return figures

    def _count(self, choice_index: int, piece: Piece) -> None:
        """Add the time and the tokens of a piece; `piece.drafted` says whether all of these were drafted."""
        self._last_time, size = time.perf_counter(), len(piece.tokens)
        self._first_time = self._first_time or self._last_time
        counts = {"tokens": size, "accepted": size * piece.drafted, "proposed": piece.proposed, "passes": piece.passes}
        self._counts[choice_index].update(counts)

    def _event(self, choice_jsons: Sequence[str], extra_fields: Json | None = None) -> str:
        return f"data: {self._record('chat.completion.chunk', choice_jsons, extra_fields or {})}\n\n"

    def _record(self, object_name: str, choice_jsons: Sequence[str], fields: Json) -> str:
        """The JSON of a record with `choice_jsons`, which are JSON, and further `fields`. object_name: in a chat."""
        record = self._head | {"object": object_name if self._is_chat else "text_completion"} | fields
        return f'{json.dumps(record)[:-1]}, "choices": [{", ".join(choice_jsons)}]}}'  # [:-1]: before its }

    def _usage(self) -> Json:
        totals, prompt_tokens = sum(self._counts, Counter[str]()), self._prompt_tokens
        tokens, accepted = totals["tokens"], totals["accepted"]
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": totals["proposed"] - accepted}
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        return {"usage": {**counts, "completion_tokens_details": details}}

    def _choice(self, choice_index: int, scored_pieces: Sequence[ScoredPiece], message_key: str) -> str:
        """The JSON of a choice, or of some of its pieces. message_key: "message", or "delta" in a stream."""
        job, is_first = self.jobs[choice_index], choice_index not in self._opened
        self._opened.add(choice_index)
        text, role_field = "".join(piece.text for piece, _ in scored_pieces), {"role": "assistant"} if is_first else {}
        content: Json = {message_key: role_field | {"content": text}} if self._is_chat else {"text": text}
        choice: Json = {"index": choice_index, **content, "finish_reason": scored_pieces[-1][0].reason}
        if self.request.return_token_ids:
            choice["token_ids"] = [token for piece, _ in scored_pieces for token in piece.tokens]
            choice["drafted"] = [piece.drafted for piece, _ in scored_pieces for _ in piece.tokens]
            choice |= {"prompt_token_ids": job.ids} if is_first else {}
        score_rows = [row for _, piece_rows in scored_pieces for row in piece_rows]
        logprobs_json = "null" if job.logprobs is None else self._join_scores(score_rows)
        return f'{json.dumps(choice)[:-1]}, "logprobs": {logprobs_json}}}'  # [:-1]: before its }

    def _join_scores(self, score_rows: Sequence[ScoreRow]) -> str:
        """The JSON of a choice's log-probabilities, from those of its tokens."""
        list_names = ("content",) if self._is_chat else ("tokens", "token_logprobs", "top_logprobs")
        list_texts = (", ".join(row[column] for row in score_rows) for column in range(len(list_names)))
        members = (f'"{name}": [{entries}]' for name, entries in zip(list_names, list_texts, strict=True))
        return f"{{{', '.join(members)}}}"

    def _scores(self, piece: Piece) -> list[ScoreRow]:
        write_row = self._chat_row if self._is_chat else self._text_row  # no scores: no rows (`strict=False`)
        return [write_row(token, scores) for token, scores in zip(piece.tokens, piece.scores, strict=False)]

    def _text_row(self, token: int, scores: TokenScores) -> ScoreRow:
        """The token's name, its log-probability, and the top list, in which the token stands too."""
        top = {self._name(key): value for key, value in scores.top.items()} | {self._name(token): scores.logprob}
        top_json = ", ".join(f"{name}: {max(value, MIN_LOGPROB)}" for name, value in top.items())
        return self._name(token), str(max(scores.logprob, MIN_LOGPROB)), f"{{{top_json}}}"

    def _chat_row(self, token: int, scores: TokenScores) -> ScoreRow:
        """The token's entry, with the top list in it."""
        chosen_fields, *top_fields = (
            f'"token": {self._name(token_id)}, "logprob": {max(logprob, MIN_LOGPROB)}, "bytes": null'
            for token_id, logprob in ((token, scores.logprob), *scores.top.items())
        )
        top_json = ", ".join(f"{{{members}}}" for members in top_fields)
        return (f'{{{chosen_fields}, "top_logprobs": [{top_json}]}}',)

    def _name(self, token: int) -> str:
        return f'"token_id:{token}"' if self.request.return_tokens_as_token_ids else self._token_name(token)

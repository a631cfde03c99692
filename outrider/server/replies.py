"""The records of an answer, as OpenAI's API has them: whole, or in pieces.

If token ids are asked for, choices also have `prompt_token_ids`, `token_ids`, and `drafted`: for each of them whether
the drafter proposed it.
"""

import time
import uuid
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from outrider.server.asked import ChatRequest, Json, Request
from outrider.server.writing import Job, Piece

_LEAST = -9999.0  # what OpenAI's API says of a token without probability: JSON has no infinity


class Reply:
    """The records of one answer. model: its name here."""

    def __init__(self, request: Request, jobs: Sequence[Job], model: str, tokenizer: PreTrainedTokenizerBase):
        self._request, self._jobs, self._tokenizer = request, jobs, tokenizer
        self._chat = isinstance(request, ChatRequest)
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._begun = set[int]()  # choices that have a record
        self._pieces: dict[int, list[Piece]] = {index: [] for index in range(len(jobs))}

    def take(self, index: int, piece: Piece) -> None:
        """A piece of the choice `index` has come."""
        self._pieces[index].append(piece)

    def chunk(self, index: int, piece: Piece) -> Json | None:
        """The record of a piece in a stream; None if it says nothing."""
        if not (piece.text or piece.reason or piece.scores or (piece.tokens and self._request.return_token_ids)):
            return None
        role = {} if index in self._begun else {"role": "assistant"}
        said: Json = {"delta": role | {"content": piece.text}} if self._chat else {"text": piece.text}
        return self._record("chat.completion.chunk", [self._choice(index, said, [piece])])

    def whole(self) -> Json:
        """The answer, once all pieces are there."""
        choices = []
        for index, own in self._pieces.items():
            text = "".join(piece.text for piece in own)
            said: Json = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(self._choice(index, said, own))
        return self._record("chat.completion", choices) | self._usage()

    def counts(self) -> Json | None:
        """The last record of a stream, with its usage; None unless it is asked for."""
        asked = (self._request.stream_options or {}).get("include_usage")
        return self._record("chat.completion.chunk", []) | self._usage() if asked else None

    def _record(self, kind: str, choices: Sequence[Json]) -> Json:
        return {**self._head, "object": kind if self._chat else "text_completion", "choices": choices}

    def _usage(self) -> Json:
        prompt = sum(len(job.ids) for job in self._jobs[:: self._request.n or 1])  # each once
        pieces = [piece for own in self._pieces.values() for piece in own]
        tokens = sum(len(piece.tokens) for piece in pieces)
        accepted = sum(len(piece.tokens) for piece in pieces if piece.drafted)
        rejected = sum(piece.proposed for piece in pieces) - accepted
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return {"usage": {**counts, "completion_tokens_details": details}}

    def _choice(self, index: int, said: Json, pieces: Sequence[Piece]) -> Json:
        job = self._jobs[index]
        choice: Json = {"index": index, **said, "logprobs": None, "finish_reason": pieces[-1].reason}
        if job.logprobs is not None:
            choice["logprobs"] = self._logprobs(pieces)
        if self._request.return_token_ids:
            choice["token_ids"] = [token for piece in pieces for token in piece.tokens]
            choice["drafted"] = [piece.drafted for piece in pieces for _ in piece.tokens]
            choice |= {} if index in self._begun else {"prompt_token_ids": job.ids}
        self._begun.add(index)
        return choice

    def _logprobs(self, pieces: Sequence[Piece]) -> Json:
        """Log-probabilities as chat completions have them, or as completions do, with the token in its top list."""
        rows = list[tuple[Json, list[Json]]]()
        for piece in pieces:
            for token, scores in zip(piece.tokens, piece.scores, strict=False):
                rows.append((self._entry(token, scores.own), [self._entry(*one) for one in scores.top.items()]))
        if self._chat:
            return {"content": [own | {"top_logprobs": top} for own, top in rows]}
        return {
            "tokens": [own["token"] for own, _ in rows],
            "token_logprobs": [own["logprob"] for own, _ in rows],
            "top_logprobs": [{str(one["token"]): one["logprob"] for one in [*top, own]} for own, top in rows],
        }

    def _entry(self, token: int, value: float) -> Json:
        named = self._request.return_tokens_as_token_ids
        name = f"token_id:{token}" if named else str(self._tokenizer.decode([token]))
        return {"token": name, "logprob": max(value, _LEAST), "bytes": None}

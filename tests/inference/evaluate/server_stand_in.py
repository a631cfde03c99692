"""A stand-in for a running server: it streams what a plan says as vLLM does, and counts drafts as its /metrics do."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from tests.inference.batch.serving import Said, as_json, listening
from tests.inference.serving.engine_stand_in import steps

Json = dict[str, Any]
PER_PLACE = "accepted_tokens_per_pos"


@dataclass
class Plan:
    """What a server says. texts: by prompt, as JSON; accepted: of a prompt's rounds, none without a drafter.

    changed: the place and the token that every text has there instead. together: steps in one chunk. ids: whether it
    names tokens. counts: of its page, factors by name; timings: it counts in its answers instead, as llama.cpp.
    """

    decode: Callable[[list[int]], str]
    texts: dict[str, list[int]]
    accepted: dict[str, list[int]] = field(default_factory=dict)
    length: int = 0
    changed: tuple[int, int] | None = None
    together: int = 1
    ids: bool = True
    counts: dict[str, int] = field(default_factory=dict)
    timings: bool = False
    streams: bool = True
    ends: bool = True
    read: Callable[[str], str] = str  # what it says of a text
    usage: Any = None  # instead of what it counts
    told: dict[str, int] = field(default_factory=dict)
    asked: list[Json] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def chunks(self, body: Json) -> list[list[int]]:
        """Of a text as it is said, after counting its rounds."""
        prompt = json.dumps(body["prompt"])
        text = self.texts.get(prompt, [64, 65, 66, 67])[: body["max_tokens"]]
        if self.changed and len(text) > self.changed[0]:
            text = [*text[: self.changed[0]], self.changed[1], *text[self.changed[0] + 1 :]]
        accepted = self.accepted.get(prompt, [])
        said = steps(text, accepted)
        with self.lock:
            self.asked.append(body)
            for _, count in zip(said[1:], accepted, strict=False):
                for name in ("drafts", *["accepted_tokens"] * count, *(f"{PER_PLACE}/{at}" for at in range(count))):
                    self.told[name] = self.told.get(name, 0) + self.counts.get(name.partition("/")[0], 1)
        return [
            [token for step in said[at : at + self.together] for token in step]
            for at in range(0, len(said), self.together)
        ]

    def page(self) -> str:
        """/metrics."""
        names = ("drafts", "accepted_tokens", *(f"{PER_PLACE}/{at}" for at in range(self.length)))
        lines = ['vllm:num_requests_running{engine="0"} 1.0']
        for name in names if self.length else ():
            kind, _, place = name.partition("/")
            labels = 'engine="0"' + f',position="{place}"' * bool(place)
            lines.append(f"vllm:spec_decode_num_{kind}_total{{{labels}}} {float(self.told.get(name, 0))}")
            lines.append(f"vllm:spec_decode_num_{kind}_created{{{labels}}} 1.7e+09")
        return "\n".join(lines)

    def events(self, body: Json) -> Iterator[Json]:
        """The chunks of a stream."""
        said = self.chunks(body)
        for place, tokens in enumerate(said):
            last = place == len(said) - 1 and self.ends
            choice: Json = {"text": self.read(self.decode(tokens)), "finish_reason": "length" if last else None}
            own = {"token_ids": tokens} if self.ids else {}
            rounds = self.accepted.get(json.dumps(body["prompt"]), [])[:place]
            told = {"predicted_n": 1 + place + sum(rounds), "draft_n_accepted": sum(rounds)}
            told |= {"draft_n": self.length * len(rounds)} if rounds else {}
            more: Json = {"timings": told} if self.timings else {}
            yield {"choices": [choice | own], "system_fingerprint": "vllm-1", **more}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": sum(map(len, said))}
        yield {"choices": [], "usage": self.usage or usage}


def running(plan: Plan) -> Any:
    """The URL of a server on this machine."""

    def say(path: str, body: Any, _: dict[str, str]) -> Said:
        if path == "/metrics":
            return 404 if plan.timings else 200, {"Content-Type": "text/plain"}, plan.page().encode()
        if body is None:
            return as_json(200, {"data": [{"id": "tiny", "owned_by": "vllm"}]})
        if not body["stream"] or not plan.streams:
            tokens = [token for step in plan.chunks(body) for token in step]
            choice = {"text": plan.decode(tokens), "token_ids": tokens, "finish_reason": "length"}
            return as_json(200, {"choices": [choice]})
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in plan.events(body)]
        content = "".join([*lines, "data: [DONE]\n\n"]).encode()
        return 200, {"Content-Type": "text/event-stream; charset=utf-8"}, content

    return listening(say)

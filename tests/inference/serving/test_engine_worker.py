"""What the worker asks of an engine, and that transformers does as it is asked."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference.serving.engine_worker import VLLM, Request, Transformers
from tests.tiny import random_prompt, save_target

PROMPTS = [random_prompt(length, seed=length) for length in (5, 12, 7, 9, 6)]


class FakeLLM:
    """Counts the requests that it has at a time. Its steps say the request's number, up to max_tokens times."""

    def __init__(self, **options: Any) -> None:
        self.options, self.llm_engine, self.asked, self.most = options, self, dict[str, Any](), 0
        self.running: dict[str, int] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.asked[name] = (prompt["prompt_token_ids"], params)
        self.running[name] = params.max_tokens
        self.most = max(self.most, len(self.running))

    def step(self) -> Iterator[Any]:
        for name in [*self.running]:
            self.running[name] -= 1
            tokens = [] if self.running[name] == 1 else [int(name)]  # a step without a token, as of a long prompt
            finished = self.running[name] == 0
            if finished:
                del self.running[name]
            yield SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens)], finished=finished)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    engine = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace, __version__="0", sampling_params=kinds)
    monkeypatch.setitem(sys.modules, "vllm", engine)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "0")


def vllm_job(draft: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    return {"engine": "vllm", "device": "cpu", "target": "t", "revision": None, "dtype": "float32", "context": 99,
            "most": 4, "draft": draft, "options": options}  # fmt: skip


def asked(sampling: dict[str, float], **changes: Any) -> dict[str, Any]:
    return {"prompts": PROMPTS, "seeds": range(len(PROMPTS)), "concurrency": 1, "max_new_tokens": 8, "eos": [],
            "temperature": 0.0, "sampling": sampling, **changes}  # fmt: skip


@pytest.mark.usefixtures("vllm")
def test_vllm_drafts_in_the_arm_with_a_drafter_alone() -> None:
    """Its own options of drafts are of that arm, and the user's go before ours; no arm finds prompts in a cache."""
    given = {"speculative_config": {"num_speculative_tokens": 2, "other": 1}, "max_num_seqs": 7}
    draft = {"method": "draft_model", "model": "d", "tokens": 5, "max_ngram": 3}
    plain, drafted = (VLLM(vllm_job(one, **given)).llm.options for one in (None, draft))
    assert "speculative_config" not in plain
    assert drafted["speculative_config"] == {
        "method": "draft_model", "model": "d", "num_speculative_tokens": 2, "other": 1,
    }  # fmt: skip
    assert plain["max_num_seqs"] == 7
    assert not plain["enable_prefix_caching"]
    lookup = VLLM(vllm_job({**draft, "method": "ngram"})).llm.options["speculative_config"]
    assert (lookup["prompt_lookup_max"], lookup["num_speculative_tokens"]) == (3, 5)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_vllm_has_so_many_requests_at_a_time(concurrency: int) -> None:
    """And each answer is at its prompt's place, drawn by its own seed."""
    engine = VLLM(vllm_job(None))
    done = engine.run(asked({"top_p": 0.9}, concurrency=concurrency, temperature=0.5, eos=[3], max_new_tokens=3))
    assert engine.llm.most == concurrency
    assert [one.tokens for one in done] == [[[place], [place]] for place in range(len(PROMPTS))]
    assert all(len(one.times) == 3 for one in done)
    for place, (prompt, params) in enumerate(engine.llm.asked.values()):
        assert prompt == PROMPTS[place]
        assert (params.seed, params.temperature, params.top_p, params.stop_token_ids) == (place, 0.5, 0.9, [3])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose generation config has what a run that says otherwise must not take from it."""
    path = save_target(tmp_path_factory.mktemp("worker") / "target")
    own = {"top_k": 1, "do_sample": True, "repetition_penalty": 5.0, "suppress_tokens": [*range(100)]}
    (path / "generation_config.json").write_text(json.dumps({**own, "eos_token_id": [*range(200)]}))
    return path


def transformers_job(target: Path, draft: dict[str, Any] | None) -> dict[str, Any]:
    return {"target": str(target), "revision": None, "dtype": "float32", "device": "cpu", "draft": draft, "options": {}}


def said(requests: list[Request]) -> list[list[int]]:
    return [[token for step in one.tokens for token in step] for one in requests]


@torch.inference_mode()
def test_transformers_says_the_targets_text(target: Path) -> None:
    """To the end, drafted or not; every token comes in one step and each step has its time."""
    model, wanted = AutoModelForCausalLM.from_pretrained(target), []
    for prompt in PROMPTS:
        ids = [*prompt]
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        wanted.append(ids[len(prompt) :])
    model = {"method": "draft_model", "model": str(target), "tokens": 2}
    for draft in (None, model, {"method": "ngram", "max_ngram": 2, "tokens": 3}):
        done = Transformers(transformers_job(target, draft)).run(asked({}))
        assert said(done) == wanted
        assert all(len(one.times) == len(one.tokens) + 1 for one in done)
        assert all(one.times == sorted(one.times) for one in done)
    steps = [[len(step) for step in one.tokens] for one in Transformers(transformers_job(target, model)).run(asked({}))]
    assert {tuple(step) for step in steps} == {(3, 3, 2)}  # the target's own drafts are all accepted
    eos = wanted[0][2]
    ended = Transformers(transformers_job(target, None)).run(asked({}, eos=[eos]))
    assert said(ended)[0] == wanted[0][: wanted[0].index(eos) + 1]


def test_transformers_draws_from_all_tokens_or_those_asked_for(target: Path) -> None:
    """By the seed of each prompt."""
    engine, seeds = Transformers(transformers_job(target, None)), range(150)
    hot = asked({}, prompts=PROMPTS[:1] * len(seeds), seeds=seeds, temperature=1e5, max_new_tokens=1)
    drawn = said(engine.run(hot))
    assert said(engine.run(hot)) == drawn
    assert len({tokens[0] for tokens in drawn}) > 80  # of 259 that are about as likely; its default would be 50
    assert len({tokens[0] for tokens in said(engine.run({**hot, "sampling": {"top_k": 3}}))}) == 3

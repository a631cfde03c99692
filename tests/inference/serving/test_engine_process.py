"""A serving engine's process: one that cannot run is named before, none is left, and it is asked what the run says."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.base.errors import UserError
from outrider.inference.core.rounds import Round
from outrider.inference.serving.engine_process import start_engine
from outrider.inference.serving.engine_worker import VLLM, Continuation, Transformers
from tests.refusals import refusal
from tests.tiny import random_prompt, save_target

JOB = {"engine": "vllm"}


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """A Python that runs `body` whatever it is asked to run; `say` answers a line."""

    def write(body: str) -> str:
        python, imports = tmp_path / "python", "import json, os, signal, subprocess, sys, time"
        python.write_text(f"#!{sys.executable}\n{imports}\ndef say(x): print(json.dumps(x), flush=True)\n{body}")
        python.chmod(0o755)
        return str(python)

    return write


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["it ends", "Ctrl-C while it loads", "Ctrl-C while it runs", "no error"])
def test_no_process_is_left(
    how: str, script: Callable[[str], str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Neither of the engine nor of what it started."""
    pids, before = tmp_path / "pids", signal.signal(signal.SIGINT, signal.default_int_handler)  # workers ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    python = script(f"""
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
if {how == "it ends"}: sys.exit("nothing to say")
if {how == "Ctrl-C while it loads"}: os.kill(os.getppid(), signal.SIGINT); time.sleep(600)
say({{"version": "1"}})
time.sleep(600)
""")
    said = {"it ends": pytest.raises(UserError, match="its last words: nothing to say"), "no error": nullcontext()}
    with said.get(how, pytest.raises(KeyboardInterrupt)), start_engine(python, JOB, tmp_path / "log", {}):
        if how == "Ctrl-C while it runs":
            raise KeyboardInterrupt
    until = time.monotonic() + 10
    for pid in map(int, pids.read_text().split()):
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert not alive(pid)


def test_steps_are_rounds_but_the_first(script: Callable[[str], str], tmp_path: Path) -> None:
    """Of an engine that drafts after the prompt already, too. A prompt without tokens is named."""
    python = script("""
json.loads(sys.stdin.readline())
say({"version": os.environ["WHICH"]})
for line in sys.stdin:
    said = [{"tokens": [[1, 2], [3], [4, 5, 6]], "times": [1.0, 3.0, 3.5, 4.75]}, {"tokens": [[7]], "times": [1, 2]}]
    asked = json.loads(line)
    say({"requests": said if asked["seeds"] == [8, 9] else [{"tokens": [], "times": [0]}], "seconds": 9.0})
""")
    with start_engine(python, JOB, tmp_path / "log", {"WHICH": "one of ours"}) as engine:
        (text, short), seconds = engine.continue_prompts([[0], [0, 0]], {"seeds": [8, 9]}, 3)
        refusal("says nothing after a prompt of 4 tokens", engine.continue_prompts, [[0] * 4], {"seeds": [0]}, 3)
    assert (engine.version, seconds) == ("one of ours", 9.0)
    assert (text.tokens, text.prefill_seconds, text.decode_seconds) == ((1, 2, 3, 4, 5, 6), 2.0, 1.75)
    assert text.rounds == (Round((3,), 3, 0, 3, 0.5), Round((4, 5, 6), 3, 2, 3, 1.25))
    assert (short.tokens, short.prefill_seconds, short.decode_seconds, short.rounds) == ((7,), 1, 0, ())


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
def test_vllm_drafts_in_the_arm_with_a_drafter_alone(tmp_path: Path) -> None:
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
    (tmp_path / "config.json").write_text('{"pard_token": 3}')
    one_pass = VLLM(vllm_job({**draft, "model": str(tmp_path)})).llm.options["speculative_config"]
    assert one_pass["parallel_drafting"]
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


def said(requests: list[Continuation]) -> list[list[int]]:
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

"""One request or many: peers write the target's texts, a run goes on where it stopped, figures are of all requests."""

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.tiny import byte_tokenizer, random_prompt, save_target
from tests.train.jobs import CHAT

PROMPTS = [random_prompt(length, seed=length) for length in (9, 4, 12, 7)]
ENGINE = f"""#!{sys.executable}
import json, os, sys
job = json.loads(sys.stdin.readline())
with open(os.environ["STARTS"], "a") as starts:
    print(job["engine"], file=starts)
assert job["engine"] != "vllm", "not here"
print(json.dumps(dict(version="1")), flush=True)
for line in sys.stdin:
    asked, step = json.loads(line), 2 if job["draft"] is None else 1
    one = dict(tokens=[[7]] * asked["max_new_tokens"], times=[step * n for n in range(asked["max_new_tokens"] + 1)])
    print(json.dumps(dict(requests=[one] * len(asked["prompts"]), seconds=8.0)), flush=True)
"""


@pytest.mark.slow
def test_peers_write_the_target_s_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import batch_peers

    monkeypatch.setattr(transformers, "CompileConfig", partial(transformers.CompileConfig, backend="eager"))
    target = str(save_target(tmp_path / "target"))
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    written = [model.generate(torch.tensor([one]), max_new_tokens=8, do_sample=False) for one in PROMPTS]
    expected = [ids[0, len(one) :].tolist() for ids, one in zip(written, PROMPTS, strict=True)]
    job = {"target": target, "revision": None, "dtype": "float32", "device": "cpu", "context": 64, "most": 3}
    asked: Any = {"prompts": PROMPTS, "concurrency": 3, "max_new_tokens": 8, "eos": [], "temperature": 0}
    asked |= {"sampling": {}, "seeds": [3, 3, 4, 5]}
    made: dict[str, Any] = {}
    for peer, draft in (("Outrider", None), ("Outrider", {}), ("Compiled", None)):
        engine = made[peer] = getattr(batch_peers, peer)({**job, "options": {}, "draft": draft})
        found = engine.run(asked)
        assert [[token for step in one.tokens for token in step] for one in found] == expected, peer
        assert all(len(one.times) == len(one.tokens) + 1 and one.times == sorted(one.times) for one in found)
    ended = made["Outrider"].run({**asked, "eos": [expected[0][2]]})[0]
    assert [token for step in ended.tokens for token in step] == expected[0][: expected[0].index(expected[0][2]) + 1]
    sampled = [made["Outrider"].run({**asked, "prompts": PROMPTS[:1] * 4, "temperature": 1.5}) for _ in range(2)]
    texts = [[[token for step in one.tokens for token in step] for one in each] for each in sampled]
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][1] not in texts[0][2:]


def test_a_run_goes_on_and_its_figures_are_of_all_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_batch

    byte_tokenizer(CHAT).save_pretrained(path := save_target(tmp_path / "target", eos_token_id=257))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"turns": [f"{n}", "and?"]}) + "\n" for n in range(2)))
    (python := tmp_path / "python").write_text(ENGINE)
    python.chmod(0o755)
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    options = Namespace(
        target=str(path), prompts=[f"all={tmp_path}/prompts.jsonl"], per_category=2, prompt_tokens=64, new_tokens=4,
        in_flight=[1, 2], requests=4, parts=2, each=1, draft_tokens=4, threads=1, talk=2, ends="long", temperature=0.0,
        top_p=1.0, early_exit=None, small_lm=None, table=None, gguf_small_lm=None, llama_server=None, gguf=[], note="",
        openvino=[], arms=["outrider prompt_*", "vllm"], python=[f"{one}={python}" for one in ("outrider", "vllm")],
        work=tmp_path, out=tmp_path / "out.json", entry="x", minutes=0.0,
    )  # fmt: skip

    def entry_after(**changes: Any) -> Any:
        bench_batch.record(Namespace(**vars(options) | changes))
        return json.loads(options.out.read_text())["entries"]["x"]

    assert (entry_after()["turns"], (tmp_path / "starts").read_text()) == ([], "outrider\n")
    entry = entry_after(minutes=9.0)
    assert (tmp_path / "starts").read_text().split() == ["outrider"] * 3 + ["vllm"] * 2 + ["outrider"] * 2
    assert "not here" in entry["versions"]["vllm"]
    asked = [(turn["turn"], turn["in_flight"], [one["prompt"] for one in turn["requests"]]) for turn in entry["turns"]]
    assert asked == [(0, 1, [0]), (0, 2, [0, 2])] * 2 + [(1, 1, [1]), (1, 2, [1, 3])] * 2
    assert [*entry["arms"]] == ["outrider", "outrider prompt_lookup"]
    rates = {(arm, count): one["tokens_per_second"] for arm, own in entry["arms"].items() for count, one in own.items()}
    assert {count: rate for (_, count), rate in rates.items()} == {"1": 0.5, "2": 1.0}
    drafted = entry["arms"]["outrider prompt_lookup"]["2"]
    assert (drafted["decoding"], drafted["over_plain"]) == (1.0, {"median": 2.0, "ci95": [2.0, 2.0]})
    assert (drafted["requests"], drafted["tokens"], drafted["identical"]) == (4, 16, 4)
    assert (drafted["first_seconds"]["p95"], drafted["whole_seconds"]["median"]) == (1.0, 4.0)
    before = len((tmp_path / "starts").read_text())
    assert (entry_after(minutes=9.0)["turns"], len((tmp_path / "starts").read_text())) == (entry["turns"], before + 10)
    assert entry_after(new_tokens=5)["turns"] == []

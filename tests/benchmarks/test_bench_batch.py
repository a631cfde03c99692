"""One request or many: peers write the target's texts, a run goes on where it stopped, figures are of all requests."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import byte_tokenizer, random_prompt, save_target
from tests.train.jobs import CHAT

PROMPTS = [random_prompt(length, seed=length) for length in (9, 4, 12, 7)]
ENGINE = f"""#!{sys.executable}
import json, os, sys
job = json.loads(sys.stdin.readline())
print(job["engine"], file=open(os.environ["STARTS"], "a"))
assert job["engine"] != "vllm", "not here"
print(json.dumps(dict(version="1")), flush=True)
for asked in map(json.loads, sys.stdin):
    count, step = asked["max_new_tokens"], 2 if job["draft"] is None else 1
    one = dict(tokens=[[7]] * count, times=[n * step for n in range(count + 1)])
    print(json.dumps(dict(requests=[one] * len(asked["prompts"]), seconds=8.0)), flush=True)
"""


@pytest.mark.slow
def test_peers_write_the_target_s_texts(tmp_path: Path) -> None:
    import batch_peers

    target = str(save_target(tmp_path / "target"))
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    written = [model.generate(torch.tensor([one]), max_new_tokens=8, do_sample=False) for one in PROMPTS]
    expected = [ids[0, len(one) :].tolist() for ids, one in zip(written, PROMPTS, strict=True)]
    job = {"target": target, "revision": None, "dtype": "float32", "device": "cpu", "context": 64, "most": 3}
    asked = {"prompts": PROMPTS, "concurrency": 3, "max_new_tokens": 8, "eos": [], "temperature": 0, "sampling": {}}

    def texts(engine: Any, **changes: Any) -> list[list[int]]:
        found = engine.run({**asked, "seeds": [3, 3, 4, 5], **changes})
        assert all(len(one.times) == len(one.tokens) + 1 and one.times == sorted(one.times) for one in found)
        return [[token for step in one.tokens for token in step] for one in found]

    for draft in (None, {}):
        engine = batch_peers.Outrider({**job, "options": {}, "draft": draft})
        assert texts(engine) == expected
    assert texts(engine, eos=[expected[0][2]])[0] == expected[0][: expected[0].index(expected[0][2]) + 1]
    drawn = texts(engine, prompts=PROMPTS[:1] * 4, temperature=1.5)
    assert drawn[1] == drawn[0] not in drawn[2:]


def test_a_run_goes_on_and_its_figures_are_of_all_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_batch

    byte_tokenizer(CHAT).save_pretrained(path := save_target(tmp_path / "target", eos_token_id=257))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"turns": [f"{n}", "and?"]}) + "\n" for n in range(2)))
    (python := tmp_path / "python").write_text(ENGINE)
    python.chmod(0o755)
    monkeypatch.setenv("STARTS", str(starts := tmp_path / "starts"))
    words = (f"--target {path} --prompts all={tmp_path}/prompts.jsonl --prompt-tokens 64 --in-flight 1 2 --requests 4 "
             f"--turns 2 --each 1 --talk 2 --python outrider={python} --python vllm={python} --work {tmp_path} --out "
             f"{tmp_path}/out.json --entry x --arms vllm outrider?prompt_*").split()  # fmt: skip

    def entry_after(*more: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["bench_batch.py", *words, *more])
        bench_batch.main()
        return json.loads((tmp_path / "out.json").read_text())["entries"]["x"]

    assert (entry_after("--new-tokens=4", "--minutes=0")["turns"], starts.read_text()) == ([], "outrider\n")
    entry = entry_after("--new-tokens=4")
    assert starts.read_text().split() == ["outrider"] * 3 + ["vllm"] * 2 + ["outrider"] * 2
    assert "not here" in entry["versions"]["vllm"]
    asked = [(turn["turn"], turn["in_flight"], [one["prompt"] for one in turn["requests"]]) for turn in entry["turns"]]
    assert asked == [(0, 1, [0]), (0, 2, [0, 2])] * 2 + [(1, 1, [1]), (1, 2, [1, 3])] * 2
    assert [one["tokens_per_second"] for arm in entry["arms"].values() for one in arm.values()] == [0.5, 1.0] * 2
    drafted = entry["arms"]["outrider prompt_lookup"]["2"]
    assert [drafted[name] for name in ("decoding", "requests", "tokens", "identical")] == [1.0, 4, 16, 4]
    assert (drafted["over_plain"]["ci95"], drafted["whole_seconds"]["median"]) == ([2.0, 2.0], 4.0)
    assert entry_after("--new-tokens=4")["turns"] == entry["turns"]
    assert entry_after("--new-tokens=5", "--minutes=0")["turns"] == []

"""Many requests at once: peers write the target's texts, who waits is stopped, figures are those of all turns."""

import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import random_prompt, save_target

PROMPTS = [random_prompt(length, seed=length) for length in (9, 4, 12, 7)]


@pytest.mark.slow
def test_peers_write_the_target_s_texts(tmp_path: Path) -> None:
    import batch_peers

    target = str(save_target(tmp_path / "target"))
    model = AutoModelForCausalLM.from_pretrained(target)
    written = [model.generate(torch.tensor([one]), max_new_tokens=8, do_sample=False) for one in PROMPTS]
    expected = [ids[0, len(one) :].tolist() for ids, one in zip(written, PROMPTS, strict=True)]
    job = {"target": target, "revision": None, "dtype": "float32", "device": "cpu", "context": 64, "most": 3}
    for peer, draft in (("Outrider", None), ("Outrider", {}), ("Continuous", None)):
        engine = getattr(batch_peers, peer)({**job, "options": {}, "draft": draft})
        found = engine.run({"prompts": PROMPTS, "concurrency": 3, "max_new_tokens": 8, "eos": []})
        assert [[token for step in one.tokens for token in step] for one in found] == expected, peer
        assert all(len(one.times) == len(one.tokens) + 1 and one.times == sorted(one.times) for one in found)
    engine.manager.stop(block=True)


def test_who_waits_is_stopped_and_who_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_batch

    monkeypatch.setattr(bench_batch, "gguf_files", lambda *_: {"q8_0": "file"})
    (python := tmp_path / "python").write_text(f"""#!{sys.executable}
import json, sys
assert json.loads(sys.stdin.readline())["engine"] == "outrider", "not here"
print(json.dumps(dict(version="1")), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    one = dict(tokens=[[1]] * asked["max_new_tokens"], times=[*range(asked["max_new_tokens"] + 1)])
    print(json.dumps(dict(requests=[one] * len(asked["prompts"]), seconds=2.0)), flush=True)
""")
    python.chmod(0o755)
    kinds = ("outrider", "serve", "vllm", "llama.cpp", "continuous")
    options = Namespace(
        target="target", draft_tokens=4, threads=1, prompt_tokens=8, new_tokens=4, in_flight=[1, 2], small_lm=None,
        without=["outrider prompt_lookup"], python=[f"{one}={python}" for one in kinds], work=tmp_path, turns=2,
    )  # fmt: skip

    def stopped(arm: Any) -> bool:
        time.sleep(0.2)  # a signal takes a moment
        return Path(f"/proc/{arm.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    with ExitStack() as held:
        opened, said = bench_batch.open_arms(options, held)
        assert ([*opened], stopped(opened["outrider"])) == (["outrider"], True)
        assert {name for name, why in said.items() if "not here" in why} == {*said} - {"outrider"}
        turns = bench_batch.measure(options, opened, PROMPTS)
        assert stopped(opened["outrider"])
    assert [(one["in_flight"], [*one["texts"]]) for one in turns] == [(n, p) for n in (1, 2) for p in ([0, 2], [1, 3])]
    assert all((one["rate"], one["first"], one["whole"]) == (4.0, [1.0] * 2, [4.0] * 2) for one in turns)
    found = bench_batch.figures(
        [*turns[:2], {**turns[1], "rate": 9.0}], dict.fromkeys(range(3), (1, 1, 1, 1)) | {3: ()}
    )
    assert found["tokens_per_second"] == found["whole_seconds"]["p95"] == 4.0
    assert (found["requests"], found["tokens"], found["identical"]) == (6, 24, 4)

"""Trainers side by side: peers get the tokens that are learnt from here, and drafters of any are measured alike."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.draft_models.targets.open_target import open_target
from tests.tiny import byte_tokenizer, save_target
from tests.train.jobs import CHAT, save_responses

PEER = f"""#!{sys.executable}
import json, pathlib, shutil, sys
job = json.loads(pathlib.Path(sys.argv[2]).read_text())
out = pathlib.Path(shutil.copytree(job["target"], job["out"], dirs_exist_ok=True))
said = dict(curve=[(1.0, 5.0)] * 20 + [(2.0, job["lr"])] * 10, seconds=2.0, supervised=8, steps=3)
(out / "trained.json").write_text(json.dumps(said))
"""


@pytest.mark.slow
def test_a_peer_that_hands_over_the_target_is_never_rejected(tmp_path: Path) -> None:
    import bench_trainers

    path = save_target(tmp_path / "target", max_position_embeddings=1024, eos_token_id=257)
    byte_tokenizer(CHAT).save_pretrained(path)
    save_responses(path, tmp_path / "answers", chat=True)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (python := tmp_path / "python").write_text(PEER)
    python.chmod(0o755)
    options = Namespace(
        target=str(path), answers=f"{tmp_path}/answers/responses-*.jsonl", work=tmp_path / "work", threads=1, minutes=1,
        prompts=[f"one={tmp_path}/prompts.jsonl"], out=tmp_path / "out.json", per_category=2,
        arms=["trl_sft"], python=[f"trl={python}"], trial_steps=9, head_answers=9, new_tokens=12, draft_vocabulary=99,
        heldout_fraction=0.05, label="",
    )  # fmt: skip
    bench_trainers.record(options)
    entry, target = json.loads(options.out.read_text())["entries"]["1 minutes"], open_target(str(path))
    arm, model = entry["arms"]["trl_sft"], AutoModelForCausalLM.from_pretrained(path)
    assert (entry["measured_prompts"], arm["rate"], arm["accepted"]) == (2, min(bench_trainers.RATES), [1.0] * 4)
    for one in map(json.loads, (options.work / "small.jsonl").read_text().splitlines()):
        own = [token for token, mark in zip(one["input_ids"], one["completion_mask"], strict=True) if mark]
        assert own == [token for token in one["labels"] if token >= 0]
        assert {"a fox", "a dog"} <= {*target.tokenizer.decode(own).split("</s>")}
    said, ids = bench_trainers.surprise(str(path), target, [([*range(40, 52)], 5)]), torch.arange(40, 52)
    known = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, 4:-1], ids[5:])
    assert said == {"cross_entropy": pytest.approx(known.item(), rel=1e-4), "can_propose": 1.0}
    bench_trainers.record(Namespace(**vars(options) | {"python": []}))  # nothing is trained again


def test_the_ratio_is_of_gains_and_the_first_steps_are_not_counted() -> None:
    import trainer_peers
    from record_raw import judged_trainers

    made = [{"rounds": [[(1 + most * n, 4, most)] for n in (1, 2, 1)]} for most in (1, 2)]
    _, found = judged_trainers(dict(zip(("outrider", "trl_sft"), made, strict=True))).values()
    assert [(gain := found["gain_over_ours"])["value"], *gain["ci95"]] == pytest.approx([2.0] * 3)
    clock = trainer_peers.Clock({"steps": 10})
    for done in range(trainer_peers.WARM + 10):
        clock.note(torch.tensor(1.0), torch.ones(5))
        assert clock.step() == (done == trainer_peers.WARM + 9)
    assert (clock.scale(), clock.tokens, len(clock.curve)) == (0.0, 50, 10)

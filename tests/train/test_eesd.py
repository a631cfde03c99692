"""EESD training end to end on tiny targets: from a config to a drafter that decodes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from data_prep.text.rows import load_rows
from data_prep.text.settings import DataConfig
from draft_models.early_exit.checkpoint import WEIGHTS_FILE, from_pretrained, read_meta
from draft_models.early_exit.model import EarlyExitStudent
from draft_models.losses import IGNORE
from draft_models.targets.architectures import load_config
from draft_models.targets.fingerprint import fingerprint_target
from draft_models.targets.open_target import OpenTarget, load_tokenizer, open_target
from draft_models.targets.stack import LayerStack
from draft_models.targets.tensor_files import open_tensors
from inference.core.decode import speculative
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import ModelDrafter
from inference.settings.kinds import recorded_seconds
from inference.shapes.factory import Chain
from inference.stopping.plain import FixedLength
from outrider.errors import UserError
from outrider.run_dirs import LOCK_FILE
from tests.tiny import open_stack, random_prompt, reference_generate, save_target
from tests.train import jobs
from tests.train.fit_job import TinyModel, tiny_config, tiny_rows
from tests.train.jobs import distilling, same
from train.core.fit import fit
from train.parts.early_exit import default_exit_layer, make_student
from train.parts.heldout import heldout_prompt, heldout_prompts
from train.recipes.early_exit import evaluation_of, train_early_exit

FIT = replace(jobs.FIT, steps=6)


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(out_dir / WEIGHTS_FILE)


@pytest.mark.parametrize(("architecture", "train_head"), [("llama", True), ("qwen3", False)])
def test_a_trained_drafter_is_lossless_and_better(
    tmp_path: Path, corpus: DataConfig, architecture: str, train_head: bool, capsys: pytest.CaptureFixture
) -> None:
    path = save_target(tmp_path / "target", architecture, kv_heads=2, tied=True)
    run = distilling(path, corpus, tmp_path / "eesd", train_head=train_head, decode_prompts=2, decode_tokens=8)
    train_early_exit(replace(run, fit=replace(FIT, steps=60, eval_every=30)))
    lines = [line for line in capsys.readouterr().out.splitlines() if "eval_top1=" in line]
    top1 = [float(line.partition("eval_top1=")[2].split()[0]) for line in lines]
    assert len(top1) == 2
    assert top1[-1] > 0.5  # the text repeats itself; an untrained layer hits one byte in hundreds
    assert all("eval_tau=" in line for line in lines)

    meta = read_meta(tmp_path / "eesd")
    assert meta.exit_layer == 2
    assert meta.own_head == train_head
    assert meta.training["steps"] == 60
    assert ("head.weight" in weights(tmp_path / "eesd")) == train_head
    fingerprint = fingerprint_target(open_tensors(str(path)), load_config(str(path)), load_tokenizer(str(path)))
    drafter = from_pretrained(tmp_path / "eesd", load_config(str(path)), fingerprint, dtype=torch.float32)
    model, stack = open_stack(path)
    if not train_head:
        drafter.use_head(stack.head)
    prompt = random_prompt(20)
    rounds = list(
        speculative(stack, ModelDrafter(EarlyExitSource(drafter), Chain(FixedLength(4))), prompt, max_new_tokens=20)
    )
    assert [t for r in rounds for t in r.tokens] == reference_generate(model, prompt, 20)


def test_a_finished_exit_goes_on(tmp_path: Path, corpus: DataConfig) -> None:
    """It has its own shape and tokens; with a learning rate of next to nothing it stays what it was."""
    path = save_target(tmp_path / "target", "llama", kv_heads=2)
    shape = {"train_head": False, "exit_layer": 1, "exit_depth": 2, "draft_vocabulary": 50}
    one = distilling(path, corpus, tmp_path / "one", **shape)
    train_early_exit(replace(one, fit=FIT))
    of_a_new_one = {"train_head": True, "exit_layer": None, "exit_depth": 1, "draft_vocabulary": None}
    on = replace(one, **of_a_new_one, start=str(tmp_path / "one"), out_dir=str(tmp_path / "two"))
    train_early_exit(replace(on, fit=replace(FIT, lr=1e-12)))
    before, after = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-9)
    meta = read_meta(tmp_path / "two")
    assert (meta.exit_layer, meta.exit_depth, meta.draft_vocabulary, meta.own_head) == (1, 2, 50, False)
    assert meta.training["start"] == read_meta(tmp_path / "one").weights_sha256
    other = save_target(tmp_path / "other", "llama", kv_heads=2, seed=1)
    for changes, message in (
        ({"draft_vocabulary": 50}, "draft_vocabulary=50: expected None, its default: start="),
        ({"start": str(path)}, "no drafter.json there"),
        ({"target": str(other)}, "target"),
    ):
        with pytest.raises(UserError, match=message):
            train_early_exit(replace(on, **changes, out_dir=str(tmp_path / "three")))
    assert not (tmp_path / "three" / WEIGHTS_FILE).exists()


def test_the_drafter_is_the_best_not_the_last(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([1.5, 2.5, 2.0])
    seen: list[torch.Tensor] = []

    def decode(student: EarlyExitStudent, *_: object) -> dict[str, float]:
        seen.append(student.drafter.norm.weight.detach().clone())
        return {"tau": next(taus)}

    monkeypatch.setattr("train.recipes.early_exit.decode_student", decode)
    run = distilling(save_target(tmp_path / "target"), corpus, tmp_path / "eesd", decode_prompts=2, decode_tokens=8)
    train_early_exit(replace(run, fit=replace(FIT, eval_every=2)))
    assert torch.equal(weights(tmp_path / "eesd")["norm.weight"], seen[1])
    assert not torch.equal(seen[1], seen[2])
    training = read_meta(tmp_path / "eesd").training
    assert (training["steps"], training["step"], training["metrics"]["tau"]) == (6, 4, 2.5)
    assert training["metrics"]["norms_moved"] == 1
    with pytest.raises(UserError, match=r"decode_prompts=absent \(was 2\)"):
        train_early_exit(replace(run, decode_prompts=0, resume=True))


@pytest.mark.parametrize("minutes", [None, 1000])
def test_training_reads_only_what_it_needs(
    tmp_path: Path, corpus: DataConfig, capsys: pytest.CaptureFixture, minutes: float | None
) -> None:
    """And that once. With the shards of every other layer deleted it still trains."""
    path = save_target(tmp_path / "target", shard="40KB")
    files = open_tensors(str(path))
    needed = {n for n in files.file_of if not n.startswith(("model.layers.1.", "model.layers.2."))}
    size = sum(t.nbytes for t in open_tensors(str(path)).read(needed).values())
    for file in set(files.file_of.values()) - {files.file_of[name] for name in needed}:
        (path / file).unlink()
    assert len(list(path.glob("*.safetensors"))) < len(set(files.file_of.values()))
    train_early_exit(distilling(path, corpus, tmp_path / "eesd", exit_layer=1, minutes=minutes))
    assert f"read_bytes={size} read_tensors={len(needed)}/{len(files.file_of)} " in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["kl", "cross_entropy"])
def test_minutes_decide_the_steps_and_nothing_else(
    tmp_path: Path, corpus: DataConfig, objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With time for all of them the weights are those of a run without a limit; a resumed run keeps the number."""
    path = save_target(tmp_path / "target")
    known = distilling(path, corpus, tmp_path / "known", objective=objective)
    train_early_exit(known)
    timed = distilling(path, corpus, tmp_path / "timed", objective=objective, minutes=1000)  # so `fit` is the limit
    train_early_exit(timed)
    assert same(weights(tmp_path / "timed"), weights(tmp_path / "known"))
    short = distilling(path, corpus, tmp_path / "short", objective=objective, minutes=1e-9)
    capsys.readouterr()
    train_early_exit(short)
    assert "step=1/1 loss=" in capsys.readouterr().out
    training = read_meta(tmp_path / "short").training
    assert 0 < recorded_seconds(training) < 60
    assert (training["steps"], training["minutes"]) == (1, 1e-9)
    train_early_exit(replace(short, resume=True))
    assert "finished already" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"minutes=1 \(was 1e-09\)"):
        train_early_exit(replace(short, resume=True, minutes=1))


@pytest.mark.parametrize(("supported", "expected"), [(False, torch.float32), (True, torch.bfloat16)])
def test_the_fast_frozen_dtype(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch, supported: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    path = save_target(tmp_path / "target")
    config = distilling(path, corpus, tmp_path / "eesd", frozen_dtype="fast")
    student = make_student(config, open_target(str(path)), 2, torch.device("cpu"), tokens=None)
    assert student.stack.dtype == expected


def test_accumulation_equals_one_batch(tmp_path: Path, corpus: DataConfig) -> None:
    path = save_target(tmp_path / "target")
    train_early_exit(distilling(path, corpus, tmp_path / "whole"))
    train_early_exit(distilling(path, corpus, tmp_path / "parts", fit=replace(FIT, micro_batch_rows=1)))
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-5)


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, corpus: DataConfig) -> None:
    path = save_target(tmp_path / "target")
    out_dir = tmp_path / "eesd"
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": "cut\n')
    other = tmp_path / "other.jsonl"
    other.write_text('{"body": "no such column"}\n')
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))

    def data(file: Path, layout: str = "text") -> DataConfig:
        return replace(corpus, path=str(file), layout=layout)

    bad = {
        "no such directory": {"target": str(tmp_path / "nowhere")},
        r"exit_layer=4: expected 1 ≤ exit_layer < 4": {"exit_layer": 4},
        r"seq_len=999: the target's context is 256": {"seq_len": 999},
        "empty": {"data": data(empty)},
        r"broken\.jsonl.*2": {"data": data(broken)},
        r"other\.jsonl.*text": {"data": data(other)},
        "chat template": {"data": data(chat, "messages")},
        "cannot be written": {"out_dir": "/proc/eesd"},
        "decode_tokens=256: expected less": {"decode_prompts": 1, "decode_tokens": 256},
    }
    for message, changes in bad.items():
        with pytest.raises(UserError, match=message):
            train_early_exit(replace(distilling(path, corpus, out_dir), **changes))
        assert not out_dir.exists() or {path.name for path in out_dir.iterdir()} <= {LOCK_FILE}
    with pytest.raises(UserError, match="heldout_fraction"):
        replace(distilling(path, corpus, out_dir), data=replace(corpus, heldout_fraction=0.0))
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="expected a safetensors checkpoint"):
        train_early_exit(distilling(path, corpus, out_dir))


def test_default_exit_layer_is_in_the_papers_range() -> None:
    for layers, expected in ((4, 1), (12, 1), (32, 3), (40, 3), (80, 6)):
        assert default_exit_layer(type("Config", (), {"num_hidden_layers": layers})()) == expected


def test_the_target_distilled_into_its_own_last_layer_has_nothing_to_learn(tmp_path: Path, corpus: DataConfig) -> None:
    """Which is so for the KL divergence alone, up to the rounding of the frozen layers; saved as the target is."""
    path = save_target(tmp_path / "target", dtype="bfloat16")
    losses = {}
    for objective, frozen in (("kl", "float32"), ("kl", "bfloat16"), ("cross_entropy", "float32")):
        run = distilling(path, corpus, tmp_path / f"{objective} {frozen}", exit_layer=3, frozen_dtype=frozen)
        train_early_exit(replace(run, objective=objective, fit=replace(FIT, steps=1, log_every=1)))
        losses[objective, frozen] = jobs.log(Path(run.out_dir))[0]["loss"]
        assert {tensor.dtype for tensor in weights(Path(run.out_dir)).values()} == {torch.bfloat16}
    assert losses["kl", "float32"] < 1e-7 < losses["kl", "bfloat16"] < 1e-3 < losses["cross_entropy", "float32"]


def test_what_is_watched_is_what_it_says(tmp_path: Path, corpus: DataConfig) -> None:
    """top1 and top1_target against predictions written out with stock models, tau against a decode of its own."""
    path = save_target(tmp_path / "target", "mistral", kv_heads=2)
    run = distilling(path, corpus, tmp_path / "eesd", decode_prompts=3, decode_tokens=12, eval_batch_rows=3)
    opened = open_target(str(path))
    heldout = load_rows(corpus, opened.tokenizer, 64, "heldout", max_rows=4)
    student = EarlyExitStudent(opened.layers([0, 1, 3], dtype=torch.float32), 2, train_head=True)
    drafter = opened.layers([0, 1, 3], dtype=torch.float32)
    drafter.set_attn_implementation("eager")
    whole = AutoModelForCausalLM.from_pretrained(path)
    right = dict.fromkeys(("top1", "top1_target"), 0)
    supervised = 0
    for row in (heldout[i] for i in range(len(heldout))):
        for document in set(row["documents"].tolist()) - {-1}:
            part = row["documents"] == document
            ids, labels = row["input_ids"][part][None], row["labels"][part]
            with torch.no_grad():
                guess, choice = drafter(ids).logits[0].argmax(-1), whole(ids).logits[0].argmax(-1)
            keep = labels != IGNORE
            right["top1"] += int((guess == labels)[keep].sum())
            right["top1_target"] += int((guess == choice)[keep].sum())
            supervised += int(keep.sum())
    evaluate = evaluation_of(run, opened, heldout, student, active=True)
    assert evaluate is not None
    metrics = evaluate(student, 1)
    assert {name: metrics[name] for name in right} == pytest.approx({k: v / supervised for k, v in right.items()})

    _, stack = open_stack(path)
    rounds = [
        r
        for i in range(3)
        for r in list(
            speculative(
                stack,
                ModelDrafter(EarlyExitSource(student.drafter.requires_grad_(False)), Chain(FixedLength(4))),
                heldout_prompt(heldout[i]),
                max_new_tokens=12,
            )
        )[1:]
    ]
    assert metrics["tau"] == pytest.approx(sum(len(r.tokens) for r in rounds) / len(rounds))
    assert evaluation_of(run, opened, heldout, student, active=False) is None


def test_the_target_to_watch_with_is_there_before_training(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may patch how modules are made as soon as `fit` begins."""

    made = list[LayerStack]()
    load = OpenTarget.stack

    def stack(*given: Any, **placed: Any) -> LayerStack:
        made.append(load(*given, **placed))
        return made[-1]

    def fit(*_: object, **__: object) -> None:
        assert len(made) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(OpenTarget, "stack", stack)
    monkeypatch.setattr("train.core.driver.fit", fit)
    with pytest.raises(KeyboardInterrupt):
        train_early_exit(distilling(save_target(tmp_path / "target"), corpus, tmp_path / "eesd", decode_prompts=1))


def test_a_heldout_prompt_ends_before_the_first_answer() -> None:
    labels = torch.full((300,), IGNORE)
    labels[200:240] = 5
    row = {"input_ids": torch.arange(300), "labels": labels, "documents": torch.zeros(300, dtype=torch.long)}
    assert heldout_prompt(row) == list(range(201))  # position 200 predicts the answer's first token
    assert heldout_prompts([row, row], 1, 50) == [list(range(201))[-50:]]
    labels[:] = 5
    assert heldout_prompt(row) == list(range(128))  # plain text
    row["documents"][100:] = 1
    assert heldout_prompt(row) == list(range(50))  # half of a short one


def test_one_process_uses_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with several GPUs a plain script neither wraps the model nor multiplies the batch."""
    sizes: list[int] = []

    class Watched(TinyModel):
        def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            sizes.append(len(inputs["input_ids"]))
            return super().forward(**inputs)

    model, config = Watched(), tiny_config(steps=6)
    for wrapper in ("DataParallel", "parallel.DistributedDataParallel"):
        monkeypatch.setattr(f"torch.nn.{wrapper}", None)  # making one fails
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    fit(model, tiny_rows(), config, tmp_path)
    assert sizes == 6 * [config.batch_rows]


def test_gradient_checkpointing_changes_nothing(
    tmp_path: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def counted(*args: object, **options: object) -> object:
        calls.append(options)
        return checkpoint(*args, **options)

    monkeypatch.setattr("draft_models.early_exit.model.checkpoint", counted)
    path = save_target(tmp_path / "target")
    train_early_exit(distilling(path, corpus, tmp_path / "kept"))
    assert not calls
    train_early_exit(distilling(path, corpus, tmp_path / "recomputed", fit=replace(FIT, gradient_checkpointing=True)))
    assert len(calls) == FIT.steps  # of the one trained layer
    assert same(weights(tmp_path / "kept"), weights(tmp_path / "recomputed"))


def test_without_an_exit_layer(tmp_path: Path, corpus: DataConfig) -> None:
    """The paper's ablation: norm and head alone are trained, stored, and draft losslessly."""
    path = save_target(tmp_path / "target")
    run = distilling(path, corpus, tmp_path / "eesd", train_layer=False)
    train_early_exit(replace(run, fit=replace(FIT, steps=20)))
    assert set(weights(tmp_path / "eesd")) == {"norm.weight", "head.weight"}
    target = load_config(str(path))
    fingerprint = fingerprint_target(open_tensors(str(path)), target, load_tokenizer(str(path)))
    drafter = from_pretrained(tmp_path / "eesd", target, fingerprint, dtype=torch.float32)
    model, stack = open_stack(path)
    prompt = random_prompt(20)
    rounds = list(
        speculative(stack, ModelDrafter(EarlyExitSource(drafter), Chain(FixedLength(3))), prompt, max_new_tokens=20)
    )
    assert [t for r in rounds for t in r.tokens] == reference_generate(model, prompt, 20)
    with pytest.raises(UserError, match=r"fit\.optimizer='muon': expected adamw"):
        replace(run, fit=replace(FIT, optimizer="muon"))

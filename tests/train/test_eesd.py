"""EESD training end to end on tiny targets: from a config to a drafter that decodes."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider import cli
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.early_exit.checkpoint import WEIGHTS_FILE, from_pretrained, read_meta
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel, draft_model_of
from outrider.train.core.driver import TrainingRun
from outrider.train.eesd import make_evaluation, train_early_exit, with_shape
from outrider.train.parts.capture import TextToContinue
from outrider.train.parts.heldout import Decoding, heldout_prompt
from outrider.train.settings.drafters import EesdConfig
from tests.refusals import refusal
from tests.tiny import open_stack, save_target
from tests.train import jobs
from tests.train.jobs import by_document, distilling
from tests.typed import status_of

FIT = replace(jobs.FIT, steps=6)


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(out_dir / WEIGHTS_FILE)


def require_unchanged(target: Path, out_dir: Path) -> None:
    """The trained drafter in `out_dir` changes no token."""
    opened = open_target(str(target))
    drafter = from_pretrained(out_dir, opened.config, opened.fingerprint, dtype=torch.float32)
    model, stack = open_stack(target)
    if drafter.head is None:
        drafter.use_head(stack.head)
    jobs.require_lossless(draft_model_of(drafter), model, stack)


@pytest.mark.parametrize(("architecture", "train_head"), [("llama", True), ("qwen3", False)])
def test_a_trained_drafter_is_lossless_and_better(
    tmp_path: Path, corpus: DataConfig, architecture: str, train_head: bool, capsys: pytest.CaptureFixture
) -> None:
    """Of several tokens in one pass it says no τ of one a pass; then its masks have learned, and are stored."""
    path = save_target(tmp_path / "target", architecture, kv_heads=2, tied=True)
    run = distilling(path, corpus, tmp_path / "eesd", train_head=train_head, decode_prompts=2, decode_tokens=8)
    run = replace(run, parallel=(parallel := 4 * train_head))
    train_early_exit(replace(run, fit=replace(FIT, steps=60, eval_every=30)))
    lines = [line for line in capsys.readouterr().out.splitlines() if "eval_top1=" in line]
    assert all(("eval_tau_analytic=" in line) == (not parallel) for line in lines)
    top1 = [float(line.partition("eval_top1=")[2].split()[0]) for line in lines]
    assert len(top1) == 2
    assert top1[-1] > 0.4  # the text repeats itself; an untrained layer hits one byte in hundreds
    assert all("eval_tau=" in line for line in lines)

    meta = read_meta(tmp_path / "eesd")
    assert meta.exit_layer == 2
    assert meta.own_head == train_head
    assert meta.training["steps"] == 60
    stored, card = weights(tmp_path / "eesd"), (tmp_path / "eesd/README.md").read_text()
    assert ("head.weight" in stored) == train_head
    assert (meta.parallel or 0) == parallel
    assert ("mask" in stored) == ("no engine does with it" in card) == bool(parallel)
    assert not parallel or stored["mask"].abs().min() > 0
    require_unchanged(path, tmp_path / "eesd")


def test_a_finished_exit_goes_on(tmp_path: Path, corpus: DataConfig) -> None:
    """It has its own shape and tokens; with a learning rate of next to nothing it stays what it was. It may begin to
    draft several tokens in one pass, and end to."""
    path = save_target(tmp_path / "target", "llama", kv_heads=2)
    shape = {"train_head": False, "exit_layer": 1, "exit_depth": 2, "draft_vocabulary": 50}
    one = distilling(path, corpus, tmp_path / "one", **shape)
    train_early_exit(replace(one, fit=FIT))
    of_a_new_one = {"train_head": True, "exit_layer": None, "exit_depth": 1, "draft_vocabulary": None}
    on = replace(one, **of_a_new_one, start=str(tmp_path / "one"), out_dir=str(tmp_path / "two"))
    train_early_exit(replace(on, parallel=3, fit=replace(FIT, lr=1e-12)))
    train_early_exit(replace(on, start=on.out_dir, out_dir=str(tmp_path / "end"), fit=replace(FIT, lr=1e-12)))
    before, between, after = (weights(tmp_path / name) for name in ("one", "two", "end"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)
    assert between.keys() - after.keys() == {"mask"}
    meta = read_meta(tmp_path / "two")
    assert (meta.exit_layer, meta.exit_depth, meta.draft_vocabulary, meta.own_head) == (1, 2, 50, False)
    assert meta.training["start"] == read_meta(tmp_path / "one").weights_sha256
    other = save_target(tmp_path / "other", "llama", kv_heads=2, seed=1)
    for changes, message in (
        ({"draft_vocabulary": 50}, "draft_vocabulary=50: expected None, its default: start="),
        ({"start": str(path)}, "no drafter.json there"),
        ({"target": str(other), "data": DataConfig(source="local", path="none")}, "was trained for another target"),
    ):
        refusal(message, lambda: train_early_exit(replace(on, **changes, out_dir=str(tmp_path / "three"))))  # noqa: B023
    assert not (tmp_path / "three" / WEIGHTS_FILE).exists()


def test_the_grid_of_the_page_runs_without_an_account(tmp_path: Path, corpus: DataConfig) -> None:
    (line,) = [line for line in (jobs.ROOT / "docs/train.md").read_text().splitlines() if "--multirun" in line]
    target = save_target(tmp_path / "target")
    values = {"target": target, "exit_layer": "1,2", "decode_prompts": 1, "out_dir": f"{tmp_path}/${{exit_layer}}"}
    words = [word.partition("=")[0] for word in shlex.split(line)[2:]]
    small = ["data=local", f"data.path={corpus.path[0]}", f"data.cache_dir={tmp_path}", "seq_len=64", "decode_tokens=4"]
    small += ["data.heldout_fraction=0.2", "fit.epochs=null", "fit.steps=2", "fit.batch_rows=2", "eval_rows=2"]
    typed = [f"{word}={values[word]}" if word in values else word for word in words if word != "data"]
    assert status_of(cli.main, "outrider", "eesd", *typed, *small) == 0
    assert [read_meta(tmp_path / layer).exit_layer for layer in "12"] == [1, 2]


@pytest.mark.parametrize("cached", [False, True])
def test_training_reads_only_what_it_needs(
    tmp_path: Path, corpus: DataConfig, capsys: pytest.CaptureFixture, cached: bool
) -> None:
    """And that once, from cached distributions too. With the shards of every other layer deleted it still trains."""
    path = save_target(tmp_path / "target", shard="40KB")
    data = jobs.save_responses(path, tmp_path / "responses") if cached else corpus
    files = open_tensors(str(path))
    needed = {n for n in files.file_of if not n.startswith(("model.layers.1.", "model.layers.2."))}
    size = sum(t.nbytes for t in open_tensors(str(path)).read(needed).values())
    for file in set(files.file_of.values()) - {files.file_of[name] for name in needed}:
        (path / file).unlink()
    assert len(list(path.glob("*.safetensors"))) < len(set(files.file_of.values()))
    taught = {"objective": "acceptance", "teacher": "cached"} if cached else {}
    train_early_exit(distilling(path, data, tmp_path / "eesd", exit_layer=1, **taught))
    said = capsys.readouterr().out
    assert f"read_bytes={size} read_tensors={len(needed)}/{len(files.file_of)} " in said
    assert f"tau_analytic={'top_k_lower_bound' if cached else 'none'}" in said
    assert ("eval_tau_analytic" in jobs.log(tmp_path / "eesd")[-1]) == cached


def test_default_exit_layer_is_in_the_papers_range() -> None:
    for layers, expected in ((4, 1), (12, 1), (32, 3), (40, 3), (80, 6)):
        settings = PreTrainedConfig(num_hidden_layers=layers)
        assert with_shape(EesdConfig(target="t", data=DataConfig(), fit=FIT), settings).exit_layer == expected


def test_the_target_distilled_into_its_own_last_layer_has_nothing_to_learn(tmp_path: Path, corpus: DataConfig) -> None:
    """Which is so for the KL divergence alone, up to the rounding of the frozen layers; saved as the target is."""
    path = save_target(tmp_path / "target", dtype="bfloat16")
    losses = {}
    for objective, frozen in (("forward_kl", "float32"), ("forward_kl", "bfloat16"), ("cross_entropy", "float32")):
        run = distilling(path, corpus, tmp_path / f"{objective} {frozen}", exit_layer=3, frozen_dtype=frozen)
        train_early_exit(replace(run, objective=objective, fit=replace(FIT, steps=1, log_every=1)))
        losses[objective, frozen] = jobs.log(Path(run.out_dir))[0]["loss"]
        assert {tensor.dtype for tensor in weights(Path(run.out_dir)).values()} == {torch.bfloat16}
    exact, rounded, other = losses.values()
    assert exact < 1e-7 < rounded < 1e-3 < other


def test_what_is_watched_is_what_it_says(tmp_path: Path, corpus: DataConfig) -> None:
    """top1 and top1_target against predictions written out with stock models, tau against a decode of its own."""
    path = save_target(tmp_path / "target", "mistral", kv_heads=2)
    run = distilling(path, corpus, tmp_path / "eesd", decode_prompts=3, decode_tokens=12, eval_batch_rows=3)
    opened = open_target(str(path))
    heldout = load_rows(corpus, opened.tokenizer, 64, "heldout", max_rows=4)
    student = jobs.exit_student(opened.layers([0, 1, 3], dtype=torch.float32), 2)
    drafter = opened.layers([0, 1, 3], dtype=torch.float32)
    drafter.set_attn_implementation("eager")
    whole = AutoModelForCausalLM.from_pretrained(path)
    right = dict.fromkeys(("top1", "top1_target"), 0)
    supervised = 0
    for row in (heldout[i] for i in range(len(heldout))):
        for (part, guesses), (_, choices) in zip(by_document(drafter, row), by_document(whole, row), strict=True):
            guess, choice, labels = guesses.argmax(-1), choices.argmax(-1), row["labels"][part]
            keep = labels != IGNORE
            right["top1"] += int((guess == labels)[keep].sum())
            right["top1_target"] += int((guess == choice)[keep].sum())
            supervised += int(keep.sum())
    metrics = make_evaluation(run, opened, heldout, student)(1)
    assert {name: metrics[name] for name in right} == pytest.approx({k: v / supervised for k, v in right.items()})

    prompts = [TextToContinue(heldout_prompt(heldout[i])) for i in range(3)]
    plain = EarlyExitDraftModel(student.drafter.requires_grad_(False))
    assert metrics["tau"] == Decoding(prompts, 12, ())(open_stack(path)[1], plain)["tau"]


def test_the_target_to_watch_with_is_there_before_training(tmp_path: Path, corpus: DataConfig) -> None:
    """An engine may patch how modules are made as soon as `fit` begins."""
    path = save_target(tmp_path / "target")
    run = distilling(path, corpus, tmp_path / "eesd", decode_prompts=1)

    def fit(*_: object, evaluate: Callable[[int], dict[str, float]], **options: object) -> None:
        (path / "model.safetensors").unlink()
        assert evaluate(1)["tau"] >= 1

    with patch.object(TrainingRun, "fit", fit):
        train_early_exit(run)
    assert not (path / "model.safetensors").exists()


def test_a_heldout_prompt_ends_before_the_first_answer(tmp_path: Path) -> None:
    labels = torch.full((300,), IGNORE)
    labels[200:240] = 5
    row = {"input_ids": torch.arange(300), "labels": labels, "documents": torch.zeros(300, dtype=torch.long)}
    assert heldout_prompt(row) == list(range(201))  # position 200 predicts the answer's first token
    target = open_target(str(save_target(tmp_path)))  # whose context is 256
    assert Decoding.of(target, [row, row], 1, 206).texts == [(list(range(151, 201)), None)]
    labels[20:40] = 5
    assert heldout_prompt(row) == list(range(21))  # a short question
    chosen = Decoding.of(target, [{**row, "input_ids": row["input_ids"] + 1000 * i} for i in range(6)], 3, 8)
    assert [text.prompt[0] for text in chosen.texts] == [0, 2000, 4000]
    labels[:] = 5
    assert heldout_prompt(row) == list(range(128))  # plain text
    row["documents"][100:] = 1
    assert heldout_prompt(row) == list(range(50))  # half of a short one


def test_without_an_exit_layer(tmp_path: Path, corpus: DataConfig) -> None:
    """The paper's ablation: norm and head alone are trained, stored, and draft losslessly."""
    path = save_target(tmp_path / "target")
    run = distilling(path, corpus, tmp_path / "eesd", train_layer=False)
    train_early_exit(replace(run, fit=FIT))
    assert set(weights(tmp_path / "eesd")) == {"norm.weight", "head.weight"}
    require_unchanged(path, tmp_path / "eesd")
    refusal(r"fit\.optimizer='muon': expected adamw", replace, run, fit=replace(FIT, optimizer="muon"))


def test_a_resumed_run_has_the_target_it_began_with(tmp_path: Path, corpus: DataConfig) -> None:
    """What it reads, to the byte, and how the config says it is to be run; the teacher by a sample."""
    path = save_target(tmp_path / "target")
    plain, kl = (
        distilling(path, corpus, tmp_path / "plain"),
        distilling(path, corpus, tmp_path / "kl", objective="forward_kl"),
    )
    for run in (plain, kl):
        train_early_exit(run)
    stored = load_file(path / "model.safetensors")

    def refused(run: EesdConfig, message: str) -> None:
        refusal(rf"was made with other settings: .*{message}", train_early_exit, replace(run, resume=True))

    read, unread = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 2))
    touched = stored[read].clone()
    touched[5, 7] += 1e-5
    save_file({**stored, read: touched}, path / "model.safetensors", metadata={"format": "pt"})
    refused(plain, r"trained_on\.model\.layers\.1=")
    save_file({**stored, unread: -stored[unread]}, path / "model.safetensors", metadata={"format": "pt"})
    refused(kl, r"target\.tensors\.model\.layers\.2=")
    train_early_exit(replace(plain, resume=True))  # which has not read it

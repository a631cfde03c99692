"""What holds for every kind of drafter that is trained: the best weights are saved, and a run goes on as it began."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.base.run_dirs import code_version
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.card import CARD_FILE, add_report
from outrider.draft_models.early_exit.checkpoint import WEIGHTS_FILE, read_meta
from outrider.inference.settings.kinds import KINDS
from outrider.train.core import run_dir
from outrider.train.dspark import train_dspark
from outrider.train.eagle3 import train_eagle3
from outrider.train.eesd import train_early_exit
from outrider.train.finetune_drafter import finetune_drafter
from outrider.train.settings.drafters import DrafterConfig
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.tiny import save_target
from tests.train.jobs import (
    FIT,
    distilling,
    evaluated_by,
    finetuning,
    heading,
    interrupted_at,
    refitting,
    same,
    sparking,
)


@dataclass(frozen=True)
class TrainingCase:
    """settings: of four steps, with the changes given. file: the drafter's weights. norm: a trained one of a student,
    and its name in `file`. option: another value of one that decides."""

    kind: str
    settings: Callable[..., Any]
    train: Callable[[Any], None]
    file: str
    norm: tuple[Callable[[Any], Tensor], str]
    option: dict[str, Any]

    def run(self, target: Path, corpus: DataConfig, out_dir: Path, **changes: Any) -> Any:
        given = {"fit": FIT, "decode_prompts": 1, "decode_tokens": 8, **changes}
        return self.settings(target, corpus, out_dir, **given)

    def weights(self, out_dir: Path) -> dict[str, Tensor]:
        return load_file(out_dir / self.file)


TRAININGS = {
    "early_exit": TrainingCase("early_exit", distilling, train_early_exit, WEIGHTS_FILE,
                         (lambda student: student.drafter.norm.weight, "norm.weight"), {"objective": "reverse_kl"}),
    "small_lm": TrainingCase("small_lm", finetuning, finetune_drafter, "model.safetensors",
                       (lambda student: student.stack.norm.weight, "model.norm.weight"), {"objective": "reverse_kl"}),
    "eagle3": TrainingCase("eagle3", heading, train_eagle3, "model.safetensors",
                     (lambda student: student.head.norm.weight, "norm.weight"), {"step_decay": 0.5}),
    "mtp": TrainingCase("mtp", refitting, train_eagle3, "model.safetensors",
                  (lambda student: student.head.norm.weight, "mtp.norm.weight"), {"step_decay": 0.5}),
    "dspark": TrainingCase("dflash", sparking, train_dspark, "model.safetensors",
                     (lambda student: student.head.norm.weight, "norm.weight"), {"anchors": 0.5}),
}  # fmt: skip


RECORDS = {"small_lm": "finetune_drafter.json", "eagle3": "eagle3.json", "mtp": "eagle3.json", "dflash": "dflash.json"}


@pytest.fixture(params=TRAININGS.values(), ids=TRAININGS)
def training(request: pytest.FixtureRequest) -> TrainingCase:
    return request.param


def test_the_drafter_is_the_best_not_the_last(
    training: TrainingCase, tmp_path: Path, target: Path, corpus: DataConfig
) -> None:
    taus, seen, (norm, name) = iter([1.5, 2.5, 2.5, 2.0]), list[Tensor](), training.norm

    def evaluate(student: nn.Module, _: int) -> dict[str, float]:
        seen.append(norm(student).detach().clone())
        return {"tau": next(taus)}

    run = training.run(target, corpus, tmp_path / "out", fit=replace(FIT, eval_every=1, lr=1e-2))
    with evaluated_by(evaluate):
        training.train(run)
    assert torch.equal(training.weights(tmp_path / "out")[name], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[1], seen[3])
    if training.kind == "early_exit":
        record = read_meta(tmp_path / "out").training
    else:
        record = json.loads((tmp_path / "out" / RECORDS[training.kind]).read_text())
        assert record["last_metrics"]["tau"] == 2.0
    assert (record["steps"], record["step"], record["metrics"]["tau"]) == (4, 2, 2.5)
    for change in ({"decode_tokens": 9}, {"fit": replace(run.fit, eval_every=2)}):  # which choose them
        refusal(
            r"decode_tokens=9 \(was 8\)|eval_every=2 \(was 1\)", training.train, replace(run, **change, resume=True)
        )


RUNS = [("early_exit", {}), ("eagle3", {"keep": 0.5}), ("small_lm", {"on_policy": 0.5}),
        ("small_lm", {"parallel": 3, "position_weights": "cat"})]  # fmt: skip


STOPPED = [*RUNS[:3], ("mtp", {"position_weights": "dpace"}), *RUNS[3:], ("early_exit", {"parallel": 3}),
           ("small_lm", {"on_policy": 0.5, "lora_rank": 2})]  # fmt: skip


@pytest.mark.parametrize(("name", "more"), typical_where(STOPPED[:4].__contains__, STOPPED))
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig, name: str, more: dict[str, Any]
) -> None:
    """The best weights are those after the stop or before it; another version of the code goes on."""
    training = TRAININGS[name]
    more = more | ({"drafter": DrafterConfig(path=str(small))} if "lora_rank" in more else {})
    fit = replace(FIT, steps=6, save_every=2, eval_every=3)
    stopped, whole = (training.run(target, corpus, tmp_path / name, fit=fit, **more) for name in ("stopped", "whole"))
    interrupted_at(6, lambda: training.train(stopped))
    assert not (tmp_path / "stopped" / training.file).exists()
    record = tmp_path / "stopped" / "checkpoint-4" / run_dir.RUN_FILE
    before = json.loads(record.read_text())
    assert before["code"] == code_version()
    record.write_text(json.dumps({**before, "code": ["0.1+abc", "of an earlier version"]}))
    training.train(replace(stopped, resume=True))
    training.train(whole)
    assert same(training.weights(tmp_path / "stopped"), training.weights(tmp_path / "whole"))
    assert same(*(load_file(tmp_path / out / "checkpoint-6" / "model.safetensors") for out in ("stopped", "whole")))
    assert json.loads((tmp_path / "stopped" / "checkpoint-6" / run_dir.RUN_FILE).read_text()) == before


def test_a_finished_drafter_is_left_alone(
    training: TrainingCase, tmp_path: Path, target: Path, corpus: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """With time for all its steps it has the weights of a run without a limit; where it was not saved, it is."""
    fit = replace(FIT, steps=2)
    run, timed = (
        training.run(target, corpus, tmp_path / str(minutes), fit=fit, minutes=minutes) for minutes in (None, 1000.0)
    )
    training.train(run)
    training.train(timed)
    out = Path(timed.out_dir)
    before = training.weights(out)
    assert same(before, training.weights(Path(run.out_dir)))
    assert KINDS[training.kind].load_plugin().training_record(str(out)).seconds > 0
    add_report(out, "# Measured since\n")
    training.train(replace(timed, resume=True))
    assert capsys.readouterr().out.endswith(f"{out}: finished already\n")
    card = (out / CARD_FILE).read_text()
    assert "Measured since" in card
    assert any(word.endswith(f"={out}") for word in card.split())  # as it was given
    for file in out.iterdir():
        if file.is_file() and file.name not in ("log.jsonl", training.file):
            file.unlink()
    training.train(replace(timed, resume=True))
    assert same(before, training.weights(out))
    assert "Measured since" not in (out / CARD_FILE).read_text()


def test_a_limit_of_next_to_nothing_is_a_step(
    training: TrainingCase, tmp_path: Path, target: Path, corpus: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run = training.run(target, corpus, tmp_path / "out", fit=replace(FIT, steps=2), minutes=1e-9)
    training.train(run)
    assert "step=1/1 loss=" in capsys.readouterr().out
    training.train(replace(run, resume=True))
    assert "finished already" in capsys.readouterr().out
    training.train(replace(run, resume=True, minutes=1.0))
    assert f"longer than before; its learning rates go on at step 1 of {run.fit.steps}" in capsys.readouterr().out
    refusal(r"minutes=1e-09 \(was 1\.0\)", training.train, replace(run, resume=True, minutes=1e-9))


def test_resume_with_other_settings_text_or_target_is_refused(
    training: TrainingCase, tmp_path: Path, target: Path, corpus: DataConfig
) -> None:
    path = shutil.copytree(target, tmp_path / "target")
    run = training.run(path, corpus, tmp_path / "out", fit=replace(FIT, steps=1, save_every=None))
    training.train(run)
    text = tmp_path / "text.jsonl"
    text.write_text(Path(corpus.path[0]).read_text().replace("quick", "quiet"))
    other = save_target(tmp_path / "other", seed=1, kv_heads=2)
    described = (path / "config.json").read_text()
    (name,) = training.option
    for changes, message in (
        (training.option, rf"{name}="),
        ({"data": replace(corpus, path=str(text))}, "data_key="),
        ({"target": str(other)}, r"target\.(weights|tensors)"),
    ):
        refusal(message, training.train, replace(run, **changes, resume=True))
    (path / "config.json").write_text(described.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    refusal(r"target\.config\.rms_norm_eps=1e-05 \(was 1e-06\)", training.train, replace(run, resume=True))


@pytest.mark.parametrize(("name", "more"), RUNS)
def test_accumulation_equals_one_batch(
    tmp_path: Path, target: Path, corpus: DataConfig, name: str, more: dict[str, Any]
) -> None:
    training = TRAININGS[name]
    for rows in (None, 1):
        fit = replace(FIT, steps=2, micro_batch_rows=rows)
        training.train(training.run(target, corpus, tmp_path / str(rows), fit=fit, **more))
    one, parts = (training.weights(tmp_path / str(rows)) for rows in (None, 1))
    torch.testing.assert_close(parts, one, rtol=1e-4, atol=3e-4)  # Adam makes steps of lr = 3e-3 of tiny gradients too


@pytest.mark.parametrize("name", TRAININGS)
def test_gradient_checkpointing_changes_nothing(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig, name: str
) -> None:
    """Of adapters too, whose layers' inputs need no gradient. Each trained layer runs again in the backward pass."""
    training, calls = TRAININGS[name], list[int]()
    more = {"drafter": DrafterConfig(path=str(small)), "lora_rank": 2} if name == "small_lm" else {}

    def watch(student: Any) -> None:
        for module in student.modules():
            trained = any(parameter.requires_grad for parameter in module.parameters())
            if trained and type(module).__name__.endswith("MLP"):
                module.register_forward_pre_hook(lambda *_: calls.append(1))

    counts = []
    for folder, recomputed in (("kept", False), ("recomputed", True)):
        calls.clear()
        fit = replace(FIT, steps=2, gradient_checkpointing=recomputed)
        run = training.run(target, corpus, tmp_path / folder, fit=fit, **more)
        with evaluated_by(lambda *_: {"tau": 1.0}, watch):
            training.train(run)
        counts.append(len(calls))
    assert counts[1] == 2 * counts[0] > 0
    assert same(training.weights(tmp_path / "kept"), training.weights(tmp_path / "recomputed"))

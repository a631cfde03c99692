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
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.files import code_version
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.card import CARD_FILE, add_report
from outrider.draft_models.early_exit.checkpoint import WEIGHTS_FILE, read_meta
from outrider.inference.drafters.eagle3 import Eagle3Source
from outrider.inference.drafters.early_exit import EarlyExitSource
from outrider.inference.drafters.small_lm import SmallLMSource
from outrider.inference.settings.kinds import KINDS
from outrider.train.core import run_dir
from outrider.train.parts.heldout import Decoding
from outrider.train.recipes.eagle3 import train_eagle3
from outrider.train.recipes.early_exit import train_early_exit
from outrider.train.recipes.small_lm import finetune_drafter
from outrider.train.settings.drafters import DrafterConfig
from tests.tiny import save_target
from tests.train.jobs import FIT, distilling, finetuning, heading, interrupted_at, log, same


@dataclass(frozen=True)
class Recipe:
    """settings: of four steps, with the changes given. file: the drafter's weights. norm: a trained one that a source
    drafts with, and its name in `file`. option: another value of one that decides."""

    kind: str
    settings: Callable[..., Any]
    train: Callable[[Any], None]
    file: str
    norm: tuple[Callable[[Any], Tensor], str]
    option: dict[str, Any]

    def run(self, target: Path, corpus: DataConfig, out_dir: Path, **changes: Any) -> Any:
        return self.settings(
            target, corpus, out_dir, **{"fit": FIT, "decode_prompts": 2, "decode_tokens": 8, **changes}
        )

    def weights(self, out_dir: Path) -> dict[str, Tensor]:
        return load_file(out_dir / self.file)


def exit_norm(source: EarlyExitSource) -> Tensor:
    return source.drafter.norm.weight


def lm_norm(source: SmallLMSource) -> Tensor:
    return source.lm.norm.weight  # type: ignore[return-value]


def head_norm(source: Eagle3Source) -> Tensor:
    return source.head.norm.weight


RECIPES = {
    "early_exit": Recipe("early_exit", distilling, train_early_exit, WEIGHTS_FILE, (exit_norm, "norm.weight"),
                         {"objective": "reverse_kl"}),
    "small_lm": Recipe("small_lm", finetuning, finetune_drafter, "model.safetensors", (lm_norm, "model.norm.weight"),
                       {"objective": "reverse_kl"}),
    "eagle3": Recipe("eagle3", heading, train_eagle3, "model.safetensors", (head_norm, "norm.weight"),
                     {"step_decay": 0.5}),
}  # fmt: skip


RECORDS = {"small_lm": "finetune_drafter.json", "eagle3": "eagle3.json"}


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return request.param


def test_the_drafter_is_the_best_not_the_last(
    recipe: Recipe, tmp_path: Path, target: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus, seen, (norm, name) = iter([1.5, 2.5, 2.5, 2.0]), list[Tensor](), recipe.norm

    def decode(_: Decoding, _stack: object, source: Any) -> dict[str, float]:
        seen.append(norm(source).detach().clone())
        return {"tau": next(taus)}

    monkeypatch.setattr(Decoding, "__call__", decode)
    run = recipe.run(target, corpus, tmp_path / "out", fit=replace(FIT, eval_every=1, lr=1e-2))
    recipe.train(run)
    assert torch.equal(recipe.weights(tmp_path / "out")[name], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[1], seen[3])
    if recipe.kind == "early_exit":
        record = read_meta(tmp_path / "out").training
    else:
        record = json.loads((tmp_path / "out" / RECORDS[recipe.kind]).read_text())
        assert record["last_metrics"]["tau"] == 2.0
    assert (record["steps"], record["step"], record["metrics"]["tau"]) == (4, 2, 2.5)
    assert [line["eval_norms_moved"] for line in log(tmp_path / "out") if "eval_norms_moved" in line][-1] == 1
    for change in ({"decode_tokens": 9}, {"fit": replace(run.fit, eval_every=2)}):  # which choose them
        with pytest.raises(UserError, match=r"decode_tokens=9 \(was 8\)|eval_every=2 \(was 1\)"):
            recipe.train(replace(run, **change, resume=True))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("early_exit", {}),
        ("eagle3", {}),
        ("small_lm", {"on_policy": 0.5}),
        ("small_lm", {"on_policy": 0.5, "lora_rank": 2}),
    ],
    ids=["early_exit", "eagle3", "small_lm", "adapters"],
)
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig, name: str, more: dict[str, Any]
) -> None:
    """The best weights are those after the stop or before it; another version of the code goes on."""
    recipe = RECIPES[name]
    more = more | ({"drafter": DrafterConfig(path=str(small))} if "lora_rank" in more else {})
    fit = replace(FIT, steps=8, save_every=2, eval_every=3)
    stopped, whole = (recipe.run(target, corpus, tmp_path / name, fit=fit, **more) for name in ("stopped", "whole"))
    with pytest.raises(KeyboardInterrupt):
        interrupted_at(6, lambda: recipe.train(stopped))
    assert not (tmp_path / "stopped" / recipe.file).exists()
    record = tmp_path / "stopped" / "checkpoint-4" / run_dir.RUN_FILE
    before = json.loads(record.read_text())
    assert before["code"] == code_version()
    record.write_text(json.dumps({**before, "code": ["0.1+abc", "of an earlier version"]}))
    recipe.train(replace(stopped, resume=True))
    recipe.train(whole)
    assert same(recipe.weights(tmp_path / "stopped"), recipe.weights(tmp_path / "whole"))
    assert same(*(load_file(tmp_path / out / "checkpoint-8" / "model.safetensors") for out in ("stopped", "whole")))
    assert json.loads((tmp_path / "stopped" / "checkpoint-8" / run_dir.RUN_FILE).read_text()) == before


def test_a_finished_drafter_is_left_alone(
    recipe: Recipe, tmp_path: Path, target: Path, corpus: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """With time for all its steps it has the weights of a run without a limit; where it was not saved, it is."""
    run, timed = (recipe.run(target, corpus, tmp_path / str(minutes), minutes=minutes) for minutes in (None, 1000.0))
    recipe.train(run)
    recipe.train(timed)
    out = Path(timed.out_dir)
    before = recipe.weights(out)
    assert same(before, recipe.weights(Path(run.out_dir)))
    assert KINDS[recipe.kind].load_plugin().trained(str(out)).seconds > 0
    add_report(out, "# Measured since\n")
    recipe.train(replace(timed, resume=True))
    assert capsys.readouterr().out.endswith(f"{out}: finished already\n")
    card = (out / CARD_FILE).read_text()
    assert "Measured since" in card
    assert f"={out} " in card  # as it was given
    for file in out.iterdir():
        if file.is_file() and file.name not in ("log.jsonl", recipe.file):
            file.unlink()
    recipe.train(replace(timed, resume=True))
    assert same(before, recipe.weights(out))
    assert "Measured since" not in (out / CARD_FILE).read_text()


def test_a_limit_of_next_to_nothing_is_a_step(
    recipe: Recipe, tmp_path: Path, target: Path, corpus: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recipe.run(target, corpus, tmp_path / "out", minutes=1e-9)
    recipe.train(run)
    assert "step=1/1 loss=" in capsys.readouterr().out
    recipe.train(replace(run, resume=True))
    assert "finished already" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"minutes=1 \(was 1e-09\)"):
        recipe.train(replace(run, resume=True, minutes=1))


def test_resume_with_other_settings_text_or_target_is_refused(
    recipe: Recipe, tmp_path: Path, target: Path, corpus: DataConfig
) -> None:
    path = shutil.copytree(target, tmp_path / "target")
    run = recipe.run(path, corpus, tmp_path / "out", fit=replace(FIT, steps=1, save_every=None))
    recipe.train(run)
    text = tmp_path / "text.jsonl"
    text.write_text(Path(corpus.path[0]).read_text().replace("quick", "quiet"))
    other = save_target(tmp_path / "other", seed=1, kv_heads=2)
    described = (path / "config.json").read_text()
    (name,) = recipe.option
    for changes, message in (
        (recipe.option, rf"{name}="),
        ({"data": replace(corpus, path=str(text))}, "data_key="),
        ({"target": str(other)}, r"target\.(weights|tensors)"),
    ):
        with pytest.raises(UserError, match=message):
            recipe.train(replace(run, **changes, resume=True))
    (path / "config.json").write_text(described.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(UserError, match=r"target\.config\.rms_norm_eps=1e-05 \(was 1e-06\)"):
        recipe.train(replace(run, resume=True))


@pytest.mark.parametrize(("name", "more"), [("early_exit", {}), ("eagle3", {}), ("small_lm", {"on_policy": 0.5})])
def test_accumulation_equals_one_batch(
    tmp_path: Path, target: Path, corpus: DataConfig, name: str, more: dict[str, Any]
) -> None:
    recipe = RECIPES[name]
    for rows in (None, 1):
        recipe.train(recipe.run(target, corpus, tmp_path / str(rows), fit=replace(FIT, micro_batch_rows=rows), **more))
    one, parts = (recipe.weights(tmp_path / str(rows)) for rows in (None, 1))
    torch.testing.assert_close(parts, one, rtol=1e-4, atol=3e-4)  # Adam makes steps of lr = 3e-3 of tiny gradients too


CHECKPOINTED = [  # where it is called, and how often: for each trained layer or step of a draft
    ("early_exit", "outrider.train.students.early_exit.checkpoint", 1),
    ("small_lm", "transformers.modeling_utils.checkpoint", 2),
    ("eagle3", "outrider.train.students.eagle3.checkpoint", 3),
]


@pytest.mark.parametrize(("name", "place", "times"), CHECKPOINTED)
def test_gradient_checkpointing_changes_nothing(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch, name: str,
    place: str, times: int,
) -> None:  # fmt: skip
    """Of adapters too, whose layers' inputs need no gradient."""
    recipe, calls, real = RECIPES[name], list[object](), torch.utils.checkpoint.checkpoint
    more = {"drafter": DrafterConfig(path=str(small)), "lora_rank": 2} if name == "small_lm" else {}

    def counted(*args: object, **options: object) -> object:
        calls.append(options)
        return real(*args, **options)

    monkeypatch.setattr(place, counted)
    recipe.train(recipe.run(target, corpus, tmp_path / "kept", **more))
    assert not calls
    fit = replace(FIT, gradient_checkpointing=True)
    recipe.train(recipe.run(target, corpus, tmp_path / "recomputed", fit=fit, **more))
    assert len(calls) == times * FIT.steps
    assert same(recipe.weights(tmp_path / "kept"), recipe.weights(tmp_path / "recomputed"))

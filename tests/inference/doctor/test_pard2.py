"""PARD-2 drafters, which read the target's hidden states: their worth, misread files, and files that do not fit."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.small_lm.model import load_for_engine
from outrider.draft_models.small_lm.pard2 import CONFIG_KEYS
from outrider.draft_models.targets.open_target import OpenTarget, open_target
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.unseen_target import open_unseen
from outrider.inference.doctor.examine import compare_variants, score_variants
from outrider.inference.doctor.examinees import examine_lm
from outrider.inference.doctor.scores import Findings, Recording
from outrider.inference.drafters.small_lm.drafter import Pard2Passes, SmallLMPlugin
from outrider.inference.evaluate.evaluation import evaluate
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import SMALL_LM
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.train.parts.initial_lm import drafter_config, start_lm
from outrider.train.settings.drafters import DrafterConfig, FinetuneConfig
from outrider.train.settings.fit import FitConfig
from tests.faults import plant
from tests.inference.doctor.fitted import TEXTS, recordings, save_plain_target
from tests.pard2_files import add_projection, random_projection, save_fitted
from tests.refusals import refusal
from tests.tiny import byte_tokenizer

CHAIN = MethodConfig("small_lm", stop=StopConfig(max_draft=12))
ALONE = replace(CHAIN, target_states=False)


class Ward(NamedTuple):
    folder: Path
    target: OpenTarget
    stack: LayerStack
    texts: list[Recording]


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Ward:
    folder = tmp_path_factory.mktemp("ward")
    stack = save_plain_target(folder / "target")
    return Ward(folder, open_target(str(folder / "target")), stack, recordings(stack))


def examined(ward: Ward, where: str) -> Findings:
    plugin: Any = SmallLMPlugin()
    model = plugin.load(where, ward.target, {"m": CHAIN}, dtype=torch.float32)
    plugin.prepare(model, ward.stack)
    examinee = examine_lm(model, where, ward.target, ward.stack, ReadingChanges())
    return compare_variants(examinee, score_variants(ward.texts, {"small_lm": examinee})["small_lm"])


@pytest.mark.parametrize("in_bin", [False, True])
def test_a_file_that_is_read_as_it_was_made_has_no_better_reading(ward: Ward, tmp_path: Path, in_bin: bool) -> None:
    found = examined(ward, save_fitted(tmp_path / "lm", ward.stack, ward.texts, in_bin=in_bin))
    assert found.better is None
    assert found.ways[0].agreement > 0.9
    assert len(found.ways) > 6


MISREAD: dict[str, tuple[dict[str, Any], str]] = {
    "layers one too low": ({"pard2_target_layers": [-2, -3, -4]}, "pard2_target_layers=[4, 3, 2]"),
    "layers in another order": ({"pard2_target_layers": [-3, -2, -1]}, "pard2_target_layers=[4, 3, 2]"),
    "another scale": ({"pard2_scale": 1.0}, "pard2_scale=0.02"),
    "scale of a training's default": ({"pard2_scale": 0.01}, "pard2_scale=0.02"),
    "before the norm": ({"normed": False}, "states before the final norm"),
    "states of the token itself": ({"delay": 0}, "states 0 positions before"),
    "shifted twice": ({"delay": 2}, "states 2 positions before"),
}


@pytest.mark.parametrize("fault", MISREAD)
def test_a_misread_file_is_named(ward: Ward, tmp_path: Path, fault: str) -> None:
    changes, name = MISREAD[fault]
    found = examined(ward, save_fitted(tmp_path / "lm", ward.stack, ward.texts, **changes))
    assert found.better is not None
    assert found.better.name == name
    assert found.better.agreement > 0.9 > found.ways[0].agreement


def test_a_projection_that_harms_is_named_with_the_option_that_leaves_it_out(ward: Ward, tmp_path: Path) -> None:
    shutil.copytree(ward.folder / "target", tmp_path / "lm")
    found = examined(ward, add_projection(tmp_path / "lm", random_projection(64, 64, 500.0)))
    assert found.better is not None
    assert found.better.option == "methods.NAME.target_states=false"


def run(ward: Ward, where: str, out: Path, **methods: MethodConfig) -> dict[str, Any]:
    config = EvaluateConfig(
        target=str(ward.folder / "target"), small_lm=where, methods=methods, prompt_text=TEXTS, max_new_tokens=24,
        device="cpu", threads=1, compare_transformers=False, num_prompts=3, show_prompts=0, out_dir=str(out),
    )  # fmt: skip
    evaluate(config)
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def test_hidden_states_pay_and_wrong_ones_cost_acceptance_but_no_token(
    ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = save_fitted(tmp_path / "lm", ward.stack, ward.texts)
    report, alone = (
        run(ward, where, tmp_path / name, m=method) for name, method in (("with", CHAIN), ("alone", ALONE))
    )
    plant(monkeypatch, Pard2Passes, "commit", "-len(self._pending) - 1 :", "-len(self._pending) - 2 : -1")
    misread = run(ward, where, tmp_path / "misread", m=CHAIN)
    for one in (report, alone, misread):
        assert one["lossless"]["identical"] == 3
    assert report["tau"] > 1.9 > 1.5 > max(alone["tau"], misread["tau"])
    assert report["drafted_tokens_per_round"] > 8  # as many as the method asks, in one pass


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no layers": (lambda lm: change(lm, pard2_target_layers=None), r"small_lm=.*pard2_target_layers"),
    "no such layer": (
        lambda lm: change(lm, pard2_target_layers=[-1, -2, -9]),
        "PARD-2 for this target's hidden states",
    ),
    "a layer twice": (lambda lm: change(lm, pard2_target_layers=[-1, 4, -2]), "PARD-2 for this target's hidden states"),
    "another target": (lambda lm: change(lm, pard2_target_dim=3 * 128), "or methods.NAME.target_states=false"),
    "no mask": (lambda lm: change(lm, pard_token=None), "pard_token=None: expected the id of the mask"),
    "no tensor": (lambda lm: shutil.copy(lm.parent / "plain/model.safetensors", lm), "no such tensor; fetch it again"),
    "another width": (lambda lm: add_projection(lm, torch.ones(32, 192)), r"not \[32, 192\]; fetch it again"),
}


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_refused_by_name(ward: Ward, tmp_path: Path, fault: str) -> None:
    edit, message = REFUSED[fault]
    for name in ("lm", "plain"):
        shutil.copytree(ward.folder / "target", tmp_path / name)
    where, plugin = add_projection(tmp_path / "lm", random_projection(64, 64)), SmallLMPlugin()
    edit(tmp_path / "lm")
    refusal(message, plugin.load, where, ward.target, {"m": CHAIN}, dtype=torch.float32)
    if fault in ("no such layer", "another target"):  # which reads no hidden states then
        plugin.load(where, ward.target, {"m": ALONE}, dtype=torch.float32)


def test_a_projection_is_never_left_out_silently(ward: Ward, tmp_path: Path) -> None:
    shutil.copytree(ward.folder / "target", tmp_path / "lm")
    plugin: Any = SmallLMPlugin()
    refusal("target_states=False: expected true", plugin.load, str(tmp_path / "lm"), ward.target, {"m": ALONE})
    where = add_projection(tmp_path / "lm", random_projection(64, 64))
    refusal("which `outrider export` cannot write", load_for_engine, where, byte_tokenizer(), "auto", None)
    model = plugin.load(where, ward.target, {"m": CHAIN}, dtype=torch.float32)
    refusal("target_states=True: expected false, as no target", plugin.draft_model, model, CHAIN)
    recorded = open_unseen(str(ward.folder / "target"))  # of a replay, which has no hidden states
    refusal("or methods.NAME.target_states=false", plugin.load, where, recorded, {"m": CHAIN})
    assert type(plugin.load(where, recorded, {"m": ALONE}, dtype=torch.float32)) is LayerStack


def test_a_training_that_starts_with_one_says_that_it_leaves_the_projection_out(
    ward: Ward, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(ward.folder / "target", tmp_path / "lm")
    drafter = DrafterConfig(path=add_projection(tmp_path / "lm", random_projection(64, 64)))
    data = DataConfig(source="local", path="data.jsonl", heldout_fraction=0.2)
    config = FinetuneConfig(target=str(ward.folder / "target"), data=data, fit=FitConfig(steps=1), drafter=drafter)
    shape = drafter_config(drafter, ward.target.config, byte_tokenizer())
    lm = start_lm(config, shape, byte_tokenizer(), torch.device("cpu"))
    assert not {"pard_token", *CONFIG_KEYS} & lm.config.to_dict().keys()
    assert "PARD-2 is trained without the target's hidden states" in "".join(capsys.readouterr())


def test_a_projection_in_a_file_of_its_own_decides_a_run(tiny_models: Path, tmp_path: Path) -> None:
    """Results of one projection are not continued with another."""
    plugin, small, found = SMALL_LM.load_plugin(), tiny_models / SMALL_LM.name, []
    for size in (1.0, 2.0):
        folder = shutil.copytree(small, tmp_path / str(size))
        found.append(plugin.identity(add_projection(folder, random_projection(64, 64, size), in_bin=True)))
    assert found[0].keys() == found[1].keys() > plugin.identity(str(small)).keys()
    assert found[0] != found[1]

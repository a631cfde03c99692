"""checkpoint=DIRECTORY is whichever drafter lies there; what is none is refused before anything is loaded."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draft_models.targets.settings import EAGLE3, EARLY_EXIT, SMALL_LM, TABLE, TARGET
from inference.evaluate.compare import evaluate
from inference.loading.rehearsal import small
from inference.loading.targets import find_target
from inference.report.facts import drafter_folders
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS, kind_in
from inference.settings.method import MethodConfig
from outrider.errors import UserError
from tests.eagle3_heads import DIALECTS, head_weights, write_head

FOLDERS = {"early_exit": EARLY_EXIT, "small_lm": SMALL_LM, "eagle3": EAGLE3, "ngrams": TABLE}
LOOKUP = {"m": MethodConfig("prompt_lookup")}


@pytest.mark.parametrize(("name", "folder"), FOLDERS.items())
def test_it_is_what_lies_there(tiny_models: Path, name: str, folder: str) -> None:
    where, methods = str(tiny_models / folder), {"m": MethodConfig(name)}
    config = EvaluateConfig(checkpoint=where, target="t", methods=methods)
    assert drafter_folders(config) == {name: where}
    debug = small(replace(config, debug=True), tiny_models.parent, tiny_models)
    assert drafter_folders(debug) == {name: where}
    if name != "early_exit":  # which knows its target
        with pytest.raises(UserError, match=f"target=None: expected the model.*holds {name}, for method="):
            replace(config, target=None)
        other = next(kind for kind in KINDS.values() if kind.name == name)
        with pytest.raises(UserError, match=f"{other.option}='b': expected null where checkpoint="):
            replace(config, **{str(other.option): "b"})
        with pytest.raises(UserError, match=f"checkpoint=.*: expected an early-exit .*holds {name}, for method="):
            replace(config, methods={"m": MethodConfig()})


def test_a_head_is_known_by_its_tensors(tmp_path: Path, tiny_models: Path) -> None:
    """Of any trainer; EAGLE's own configs are those of a causal LM."""
    for dialect, facts in DIALECTS.items():
        found = kind_in(write_head(tmp_path / dialect, facts, head_weights(facts)))
        assert found is not None, dialect
        assert found.name == "eagle3", dialect
    assert kind_in(str(tiny_models / TARGET)) == KINDS["small_lm"]


def test_a_head_there_decodes(tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EvaluateConfig(
        checkpoint=str(tiny_models / EAGLE3), target=str(tiny_models / TARGET), methods={"m": MethodConfig("eagle3")},
        prompt_text=["once upon"], max_new_tokens=8, device="cpu", compare_transformers=False,
        out_dir=str(tmp_path / "out"),
    )  # fmt: skip
    evaluate(config)
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["drafter"], report["draft_vocabularies"]["eagle3"]["tokens"]) == (config.checkpoint, 256)
    assert report["doctor"] == {}  # it was written here
    capsys.readouterr()
    evaluate(replace(config, plan=True))
    assert "eagle3's weights: " in capsys.readouterr().out


def test_what_is_no_drafter_is_refused(
    models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/weights.pt").write_text("")
    target = str(models / "target")
    for name, found in (("empty", "found nothing"), ("other", r"found weights\.pt"), ("none", "no such directory")):
        made = config("out", checkpoint=str(tmp_path / name), target=target, methods=LOOKUP)
        expected = (
            rf"{name}: {found}.* drafter\.json \(early_exit\), config\.json \(small_lm or eagle3\), table\.safetensors"
        )
        for plan in (False, True):
            with pytest.raises(UserError, match=expected):
                evaluate(replace(made, plan=plan))
    with pytest.raises(UserError, match=r"eagle3=None: expected .* for m; checkpoint=.*other holds no drafter"):
        config("out", checkpoint=str(tmp_path / "other"), target=target, methods={"m": MethodConfig("eagle3")})
    assert find_target(config("out", checkpoint=str(models / "drafter"), methods=LOOKUP)).source == target

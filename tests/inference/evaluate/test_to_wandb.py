"""What Weights & Biases gets of an evaluation: the table, the figures, the page, in one run that goes on."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draft_models.targets.settings import EARLY_EXIT
from inference.report.report import COLUMNS, log_reports
from inference.settings.evaluate import EvaluateConfig
from outrider.errors import UserError
from outrider.wandb_config import WandbConfig
from tests.inference.evaluate.evaluating import METHODS, evaluate


class FakeWandb:
    """Notes what it is told, as JSON-able values."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.finished = 0

    def init(self, **options: Any) -> Any:
        self.started.append(options)
        return SimpleNamespace(id="r1", summary=self.summary, log=self.logged.append, finish=self._finish)

    def _finish(self) -> None:
        self.finished += 1

    @staticmethod
    def Table(columns: list[str], data: list[list[Any]]) -> Any:  # noqa: N802
        return columns, data

    @staticmethod
    def Html(text: str, inject: bool) -> Any:  # noqa: N802
        assert not inject
        return text


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    wandb = FakeWandb()
    wandb.__spec__ = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    return wandb


def test_an_evaluation_is_one_run_with_its_table_and_page(tmp_path: Path, tiny_models: Path, fake: FakeWandb) -> None:
    config = EvaluateConfig(
        target=str(tiny_models / "target"), checkpoint=str(tiny_models / EARLY_EXIT), methods=METHODS, max_new_tokens=6,
        out_dir=str(tmp_path / "out"), wandb=WandbConfig(mode="offline", project="p", name="n"), show_prompts=1,
    )  # fmt: skip
    evaluate(config)
    [started], [logged] = fake.started, fake.logged
    assert {key: started[key] for key in ("project", "name", "mode", "id", "resume", "job_type")} == {
        "project": "p", "name": "n", "mode": "offline", "id": None, "resume": None, "job_type": "evaluate",
    }  # fmt: skip
    assert started["config"]["max_new_tokens"] == 6
    columns, rows = logged["methods"]
    assert columns == list(COLUMNS)
    assert [row[0] for row in rows] == list(METHODS)
    assert all(dict(zip(columns, row, strict=True))["identical"] == "7/7" for row in rows)
    assert logged["report"] == (tmp_path / "out/report.html").read_text()
    assert fake.summary["tree/tau"] == rows[1][columns.index("tau")]
    assert fake.finished == 1
    log_reports(config.wandb, tmp_path / "out", [], {})  # a resumed evaluation
    assert (fake.started[1]["id"], fake.started[1]["resume"]) == ("r1", "allow")


def test_nothing_is_asked_of_it_where_it_is_disabled(tmp_path: Path, fake: FakeWandb) -> None:
    log_reports(EvaluateConfig(target="t", methods={"m": METHODS["chain"]}, checkpoint="c").wandb, tmp_path, [], {})
    assert not fake.started


def test_without_the_package_it_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.wandb_config.find_spec", lambda _: None)
    config = EvaluateConfig(
        target="nowhere",
        checkpoint="nowhere",
        methods=METHODS,
        out_dir=str(tmp_path),
        wandb=WandbConfig(mode="offline"),
    )
    with pytest.raises(UserError, match=r"wandb\.mode: wandb is not installed; pip install wandb, or disabled"):
        evaluate(config)

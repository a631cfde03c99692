"""Real engines on a real model: every kind of drafter that each takes says the target's text, and accepts as here."""

import json
from pathlib import Path

import pytest

from outrider.data_prep.settings import FetchConfig
from outrider.data_prep.targets import fetch_target
from outrider.inference.evaluate.compare import evaluate
from outrider.inference.settings.engine import MODULES, Engine, EngineConfig, why_not
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig, NgramConfig, StopConfig
from tests.tiers import typical_where

ROOT = Path(__file__).parents[3]
DRAFTERS = ROOT / "drafters" / "smollm2"
TEXTS = [f"def {name}(numbers):\n" for name in ("mean", "median", "largest", "swap", "sort", "total", "unique", "join")]
CHAIN = StopConfig(max_draft=3)
METHODS = {
    "early_exit": MethodConfig(stop=CHAIN),
    "small_lm": MethodConfig("small_lm", stop=CHAIN),
    "prompt_lookup": MethodConfig("prompt_lookup", stop=CHAIN),
    "ngrams": MethodConfig("ngrams", ngrams=NgramConfig(evidence="mixed", depth=3)),
}


def test_every_kind_that_lies_here_is_measured() -> None:
    assert {"skip_layers", "eagle3", *METHODS} == {*KINDS}  # of EAGLE-3 there is no head in drafters/


@pytest.mark.engine
@pytest.mark.parametrize("engine", typical_where("transformers".__ne__, MODULES))  # that one is always there
def test_an_engine_drafts_as_we_do(engine: Engine, tmp_path: Path) -> None:
    place = ROOT / ".engines" / engine
    if engine != "transformers" and not place.exists():
        pytest.skip("make engines installs it")
    fetch_target(FetchConfig(out_dir=str(tmp_path / "target")))
    config = EngineConfig(
        target=str(tmp_path / "target"), checkpoint=str(DRAFTERS / "eesd"), small_lm=str(DRAFTERS / "small_lm"),
        table=str(DRAFTERS / "trigrams"), template="none", prompt_text=TEXTS, max_new_tokens=64, device="cpu",
        methods={name: one for name, one in METHODS.items() if why_not(engine, one) is None},
        engine=engine, engine_python=None if engine == "transformers" else str(place), out_dir=str(tmp_path / "out"),
        concurrency=(1, 4) if engine == "vllm" else (1,),
    )  # fmt: skip
    evaluate(config)  # exits with 1 for a text that is not the target's
    for report in json.loads((tmp_path / "out/report.json").read_text())["reports"]:
        assert len(report["served"]) == len(config.concurrency)
        for row in report["served"]:
            alike = [one for one in row["acceptance"] if not one["differs"]]
            if report["method"] != "prompt_lookup":  # another look-up than ours
                assert alike == row["acceptance"]
                assert row["rounds"] >= 150

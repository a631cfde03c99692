"""A kind of drafter from outside: registered, it is known to settings, to decoding and to the report."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from draft_models.targets.settings import TARGET
from inference.core.drafter import Drafter
from inference.core.tree import DraftTree, chain_parents
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS, DrafterPlugin, Kind, register
from inference.settings.method import MethodConfig, StopConfig
from inference.sizing.policy import Tuning
from outrider.errors import UserError
from outrider.files import PACKAGES
from outrider.streams import Streams
from tests.inference.evaluate.evaluating import evaluate

ROOT = Path(__file__).parents[3]


class Cycle(Drafter):
    """Drafts the tokens of a file, over and over."""

    max_rows = 3

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def begin(self, session: Any, selector: Any, watch: Any) -> None:
        pass

    def draft(self, root: torch.Tensor, limit: int) -> DraftTree:
        tokens = (self.tokens * 3)[: min(limit, self.max_rows)]
        return DraftTree(torch.tensor(tokens, dtype=torch.long), chain_parents(0, len(tokens)), (-1,) * len(tokens))

    def commit(self, tree: DraftTree, nodes: Any, tokens: Any) -> None:
        pass


class CyclePlugin(DrafterPlugin):
    """The model is a list of token ids."""

    def identity(self, where: str | None) -> dict[str, Any]:
        return {"cycle": None if where is None else Path(where).read_text()}

    def load(self, where: str, target: Any, methods: Mapping[str, MethodConfig], **_: Any) -> list[int]:
        tokens: list[int] = json.loads(Path(where).read_text())
        return tokens

    def make(
        self, model: list[int], method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        return Cycle(model)


PLUGIN = CyclePlugin()


@pytest.fixture
def cycle() -> Iterator[Kind]:
    """The kind, known while a test runs."""
    kind = Kind("cycle", f"{__name__}:PLUGIN", option="cycle", needs="a JSON list of token ids", shaped=False)
    yield register(kind)
    KINDS.pop("cycle", None)


def test_it_decodes_and_is_reported(
    cycle: Kind, models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig]
) -> None:
    (tmp_path / "tokens.json").write_text("[97, 98]")
    made = config(
        "out", methods={"toy": MethodConfig(source="cycle")}, drafters={"cycle": str(tmp_path / "tokens.json")}
    )
    evaluate(made)
    report = json.loads((Path(made.out_dir) / "report.json").read_text())
    assert (report["method"], report["lossless"]["identical"]) == ("toy", report["lossless"]["checked"])
    assert report["drafted_tokens_per_round"] > 2
    assert str(tmp_path / "tokens.json") in report["drafter"]
    (tmp_path / "tokens.json").write_text("[97, 99]")
    with pytest.raises(UserError, match="other settings: cycle="):  # it is part of what a resumed run must agree on
        evaluate(config("out", methods=made.methods, drafters=made.drafters, resume=True))


def test_python_knows_it(cycle: Kind, tiny_models: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("[97, 98]")
    given = {"method": MethodConfig("cycle"), "drafters": {"cycle": str(tmp_path / "tokens.json")}}
    model = outrider.load(str(tiny_models / TARGET), device="cpu", **given)
    alone = outrider.load(str(tiny_models / TARGET), device="cpu")
    assert model.generate("to be or ", max_new_tokens=12) == alone.generate("to be or ", max_new_tokens=12)
    assert model.drafters == {"cycle": [97, 98]}


def test_settings_know_it(cycle: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"\+drafters\.cycle=None: expected a JSON list of token ids for m"):
        EvaluateConfig(target="t", methods={"m": MethodConfig(source="cycle")})
    with pytest.raises(UserError, match=r"drafters.cicle='x': expected one of cycle"):
        EvaluateConfig(target="t", methods={"m": MethodConfig("prompt_lookup")}, drafters={"cicle": "x"})
    with pytest.raises(UserError, match=r"stop.max_draft=3: expected None, its default: source=cycle does not read it"):
        MethodConfig(source="cycle", stop=StopConfig(max_draft=3))
    with pytest.raises(ValueError, match="registered already"):
        register(cycle)
    monkeypatch.delitem(KINDS, "cycle")
    with pytest.raises(UserError, match="source='cycle': expected one of"):
        MethodConfig(source="cycle")


NAMED = {"early_exit": 6, "small_lm": 9, "eagle3": 11, "ngrams": 4, "skip_layers": 1, "prompt_lookup": 3}


@pytest.mark.parametrize("name", NAMED)
def test_few_files_name_a_kind(name: str) -> None:
    """Outside its own folder and of what drafts: commands and options of that name among them. It may only fall."""
    own = (f"draft_models/{name}/", "inference/drafters/")
    files = [file.relative_to(ROOT).as_posix() for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    naming = [file for file in files if not file.startswith(own) and f'"{name}"' in (ROOT / file).read_text("utf-8")]
    assert len(naming) == NAMED[name], naming

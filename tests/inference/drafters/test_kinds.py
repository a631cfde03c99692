"""Kinds of drafters in commands: one from outside, what `checkpoint` holds, and those without a directory of ours."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from outrider.base.errors import UserError, require
from outrider.base.run_dirs import FOLDERS as SOURCES
from outrider.base.streams import Streams
from outrider.data_prep.text.prompts import Prompt
from outrider.draft_models.eagle3.checkpoint import open_head
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.settings import DFLASH, EAGLE3, EARLY_EXIT, SMALL_LM, TABLE, TARGET
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.tree import DraftTree, chain_parents
from outrider.inference.drafters.dflash.drafter import DFlashPlugin
from outrider.inference.drafters.eagle3.drafter import Eagle3Plugin
from outrider.inference.drafters.model_plugin import Calibrated, without_calibration
from outrider.inference.drafters.plugin import DrafterPlugin
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.evaluate import measuring
from outrider.inference.evaluate.evaluation import evaluate as command
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.loading.memory_plan import Storage, cache_bytes, drafter_memory
from outrider.inference.loading.rehearsal import shrink
from outrider.inference.loading.target_setup import find_target
from outrider.inference.measure.arms import make_arms
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.kinds import KINDS, kind_in, register
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.inference.sizing.policy import Tuning
from outrider.train.export import export_drafter
from outrider.train.settings.export import ExportConfig
from tests.block_drafters import DIALECTS as BLOCKS
from tests.block_drafters import drafter_weights, write_drafter
from tests.eagle3_heads import DIALECTS, head_weights, write_head
from tests.inference.evaluate.evaluating import evaluate
from tests.inference.priced import costs, price
from tests.refusals import refusal
from tests.tiny import random_prompt

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

    has_card = True

    def identity(self, where: str | None) -> dict[str, Any]:
        return {"cycle": None if where is None else (Path(where) / "tokens.json").read_text()}

    def load(self, where: str, target: Any, methods: Mapping[str, MethodConfig], **_: Any) -> list[int]:
        tokens: list[int] = json.loads((Path(where) / "tokens.json").read_text())
        require(len(tokens) > 0, f"cycle={where}", tokens, "token ids")
        return tokens

    def make(
        self, model: list[int], method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        return Cycle(model)


@pytest.fixture
def cycle(tmp_path: Path) -> Iterator[Kind]:
    """The kind, known while a test runs, and a model of it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokens.json").write_text("[97, 98]")
    plugin, needs = f"{__name__}:CyclePlugin", "a JSON list of token ids"
    yield register(Kind("cycle", plugin, option="cycle", needs=needs, file="tokens.json", shaped=False))
    KINDS.pop("cycle", None)


def test_a_kind_of_one_module_decodes_and_is_reported(
    cycle: Kind, models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig]
) -> None:
    where = tmp_path / "model"
    settings = {"methods": {"toy": MethodConfig(source="cycle")}, "drafters": {"cycle": str(where)}}
    evaluate(config("out", **settings, card=True))
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["method"], report["lossless"]["identical"]) == ("toy", report["lossless"]["checked"])
    assert report["drafted_tokens_per_round"] > 2
    assert str(where) in report["drafter"]
    assert "| toy |" in (where / "README.md").read_text()
    held = EvaluateConfig(checkpoint=str(where), target=str(models / "target"), methods=settings["methods"])
    assert held.paths == {"cycle": str(where)}
    (where / "tokens.json").write_text("[97, 99]")
    with pytest.raises(UserError, match="other settings: cycle="):  # it is part of what a resumed run must agree on
        evaluate(config("out", **settings, resume=True))
    (where / "tokens.json").write_text("[]")
    with pytest.raises(UserError, match=r"cycle=.*model=\[\]: expected token ids"):
        evaluate(config("empty", **settings))


def test_settings_and_help_know_it(cycle: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, message in (
        (
            {"methods": {"m": MethodConfig(source="cycle")}},
            r"\+drafters\.cycle: missing; .* a JSON list of token ids for m",
        ),
        ({"methods": LOOKUP, "drafters": {"cicle": "x"}}, r"drafters.cicle='x': expected one of cycle"),
    ):
        refusal(message, EvaluateConfig, target="t", **changes)
    unread = "stop.max_draft=3: expected None, its default: source=cycle does not read it"
    refusal(unread, MethodConfig, source="cycle", stop=StopConfig(max_draft=3))
    with pytest.raises(ValueError, match="registered already"):
        register(cycle)
    source = TypeAdapter(MethodConfig).json_schema()["properties"]["source"]
    assert source["enum"] == [*KINDS]  # what --help shows
    monkeypatch.delitem(KINDS, "cycle")
    refusal("source='cycle': expected one of", MethodConfig, source="cycle")


@pytest.mark.parametrize("name", KINDS)
def test_few_files_name_a_kind(name: str) -> None:
    """Outside its two folders: commands and options of that name among them. It may only fall."""
    own = (f"draft_models/{name}/", f"inference/drafters/{name}/")
    found = (file for folder in ("outrider", *SOURCES) for file in (ROOT / folder).rglob("*.py"))
    files = [file.relative_to(ROOT).as_posix() for file in found]
    naming = [file for file in files if not file.startswith(own) and f'"{name}"' in (ROOT / file).read_text("utf-8")]
    assert len(naming) <= 3, naming


FOLDERS = {"early_exit": EARLY_EXIT, "small_lm": SMALL_LM, "eagle3": EAGLE3, "dflash": DFLASH, "ngrams": TABLE}
LOOKUP = {"m": MethodConfig("prompt_lookup")}


@pytest.mark.parametrize(("name", "folder"), FOLDERS.items())
def test_a_checkpoint_is_what_lies_there(tiny_models: Path, name: str, folder: str) -> None:
    where, methods = str(tiny_models / folder), {"m": MethodConfig(name)}
    config = EvaluateConfig(checkpoint=where, target="t", methods=methods)
    assert config.paths == {name: where}
    debug = shrink(replace(config, debug=True), tiny_models.parent, tiny_models)
    assert debug.paths == {name: where}
    if name != "early_exit":  # which knows its target
        refusal(f"target: missing; .* the model.*holds {name}, for method=", replace, config, target=None)
        other = next(kind for kind in KINDS.values() if kind.name == name)
        refusal(f"{other.option}='b': expected null where checkpoint=", replace, config, **{str(other.option): "b"})
        with pytest.raises(UserError, match=f"checkpoint=.*: expected an early-exit .*holds {name}, for method="):
            replace(config, methods={"m": MethodConfig()})


@pytest.mark.parametrize("name", ["early_exit", "small_lm", "eagle3", "dflash"])
def test_with_another_calibration_head_it_is_another_drafter(tiny_models: Path, tmp_path: Path, name: str) -> None:
    """So that a resumed run goes on with the head that it began with."""
    where, kind = shutil.copytree(tiny_models / FOLDERS[name], tmp_path / name), KINDS[name]
    found = [kind.load_plugin().identity(str(where))]
    for facts in ("{}", '{"l2": 1}'):
        (where / str(kind.calibration)).mkdir(exist_ok=True)
        (where / str(kind.calibration) / "calibration.json").write_text(facts)
        found.append(kind.load_plugin().identity(str(where)))
    (key,) = (key for key in found[0] if key.endswith("calibration"))
    assert len({one[key] for one in found}) == 3
    assert all({**one, key: None} == {**found[0], key: None} for one in found)


def test_a_head_is_known_by_its_tensors(tmp_path: Path, tiny_models: Path) -> None:
    """Of any trainer; EAGLE's own configs are those of a causal LM."""
    for dialect, facts in DIALECTS.items():
        found = kind_in(write_head(tmp_path / dialect, facts, head_weights(facts)))
        assert found is not None, dialect
        assert found.name == "eagle3", dialect
    for dialect, block in BLOCKS.items():
        found = kind_in(write_drafter(tmp_path / f"block {dialect}", block, drafter_weights(block)))
        assert found is not None, dialect
        assert found.name == "dflash", dialect
    assert kind_in(str(tiny_models / TARGET)) == KINDS["small_lm"]


def test_a_head_there_decodes(tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EvaluateConfig(
        checkpoint=str(tiny_models / EAGLE3), target=str(tiny_models / TARGET), methods={"m": MethodConfig("eagle3")},
        prompt_text=["once upon"], max_new_tokens=8, device="cpu", compare_transformers=False,
        out_dir=str(tmp_path / "out"),
    )  # fmt: skip
    command(config)
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["drafter"], report["draft_vocabularies"]["eagle3"]["tokens"]) == (config.checkpoint, 256)
    assert report["doctor"] == {}  # it was written here
    capsys.readouterr()
    command(replace(config, plan=True))
    assert "eagle3's weights: " in capsys.readouterr().out


def test_a_block_drafter_decodes_and_its_confidence_head_stops(
    tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its own head, and by a calibration head where there is one; a drafter without either is refused."""
    price(monkeypatch, costs(step=0.0, node=0.0))
    risk, score = StopConfig("rejection_risk"), StopConfig("survival", score="head")
    methods = {"m": MethodConfig("dflash"), "risk": MethodConfig("dflash", stop=risk),
               "score": MethodConfig("dflash", stop=score)}  # fmt: skip
    config = EvaluateConfig(
        dflash=str(tiny_models / DFLASH), target=str(tiny_models / TARGET), methods=methods, doctor=True,
        prompt_text=["once upon"], max_new_tokens=16, device="cpu", compare_transformers=False,
        out_dir=str(tmp_path / "out"), card=True,
    )  # fmt: skip
    where = shutil.copytree(tiny_models / DFLASH, tmp_path / "drafter")
    config = replace(config, dflash=str(where))
    command(config)
    reports = json.loads((tmp_path / "out/report.json").read_text())["reports"]
    assert all(report["lossless"]["identical"] == report["lossless"]["checked"] > 0 for report in reports)
    assert {report["method"] for report in reports} == {*methods}
    assert "## Measured" in (where / "README.md").read_text()
    assert "doctor: dflash, " in capsys.readouterr().out
    command(replace(config, plan=True))
    assert "dflash's weights: " in capsys.readouterr().out
    target = open_target(str(tiny_models / TARGET))
    loaded = DFlashPlugin().load(str(where), target, methods, dtype=torch.float32, device="cpu")
    assert isinstance(loaded, Calibrated)
    assert loaded.head is loaded.drafter.confidence_head
    facts, weights = BLOCKS["z-lab"], load_file(where / "model.safetensors")
    assert facts.confidence == 0
    less = {name: tensor for name, tensor in weights.items() if not name.startswith("confidence_head")}
    save_file(less, where / "model.safetensors")
    refusal("no calibration head there; run outrider calibrate", command, replace(config, out_dir=str(tmp_path / "no")))


def test_a_confidence_head_decides_where_a_draft_stops(tiny_models: Path) -> None:
    """Sure of every token it lets all be drafted, sure of none but one."""
    target = open_target(str(tiny_models / TARGET))
    stack, lengths = target.stack(dtype=torch.float32), {}
    method = MethodConfig("dflash", stop=StopConfig("rejection_risk", max_draft=4))
    for bias in (-30.0, 30.0):
        model = DFlashPlugin().load(str(tiny_models / DFLASH), target, {"m": method}, dtype=torch.float32, device="cpu")
        drafter = without_calibration(model)
        drafter.confidence_head.proj.bias.data.fill_(bias)
        DFlashPlugin().prepare(model, stack)
        arms = make_arms(stack, {"dflash": model}, {"m": method}, None, TextSettings(24))
        lengths[bias] = max(r.drafted for r in arms["m"](random_prompt(9), Streams(0)).rounds)
    assert lengths == {-30.0: 1, 30.0: 4}


def test_what_is_no_drafter_is_refused(
    models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/weights.pt").write_text("")
    target = str(models / "target")
    for name, found in (("empty", "found nothing"), ("other", r"found weights\.pt"), ("none", "no such directory")):
        made = config("out", checkpoint=str(tmp_path / name), target=target, methods=LOOKUP)
        kinds = r"config\.json \(small_lm or eagle3 or mtp or dflash\)"
        expected = rf"{name}: {found}.* drafter\.json \(early_exit\), {kinds}, table\.safetensors"
        for plan in (False, True):
            refusal(expected, command, replace(made, plan=plan))
        if (tmp_path / name).exists():  # or it may be a head's Hub name
            with pytest.raises(UserError, match=expected):
                export_drafter(ExportConfig(checkpoint=str(tmp_path / name), out_dir=str(tmp_path / "served")))
    with pytest.raises(UserError, match=r"eagle3: missing; .* for m; checkpoint=.*other holds no drafter"):
        config("out", checkpoint=str(tmp_path / "other"), target=target, methods={"m": MethodConfig("eagle3")})
    assert find_target(config("out", checkpoint=str(models / "drafter"), methods=LOOKUP)).source == target


QUESTIONS = [Prompt("a", "text", ("once upon",), False), Prompt("b", "text", ("def add(",), False)]
CHAIN = MethodConfig("eagle3", stop=StopConfig(max_draft=3))


def test_a_head_is_reported_tuned_and_resumed(
    tiny_models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    price(monkeypatch, costs(step=0.0, node=0.0))  # so that every draft pays
    (tmp_path / "head").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "head" / name).write_bytes((tiny_models / EAGLE3 / name).read_bytes())
    tree = MethodConfig("eagle3", StructureConfig("opt_tree", nodes="auto", max_depth="auto"))
    methods = {"chain": CHAIN, "auto": replace(CHAIN, stop=StopConfig(max_draft="auto")), "tree": tree}
    models = {"checkpoint": None, "target": str(tiny_models / TARGET), "eagle3": str(tmp_path / "head")}
    made = config("out", methods=methods, **models)
    evaluate(made, QUESTIONS)
    for report in json.loads((Path(made.out_dir) / "report.json").read_text())["reports"]:
        assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0
        assert report["drafter"] == str(tmp_path / "head")
        assert report["draft_vocabularies"]["eagle3"]["tokens"] == 256
        assert report["seconds"]["draft"] > 0
    evaluate(replace(made, resume=True), QUESTIONS)
    weights = load_file(tmp_path / "head/model.safetensors")
    save_file({**weights, "fc.weight": 2 * weights["fc.weight"]}, tmp_path / "head/model.safetensors")
    monkeypatch.setattr(measuring, "load_models", None)  # it is refused before anything is loaded
    refusal(r"other settings: eagle3\.tensors\.fc", evaluate, replace(made, resume=True), QUESTIONS)


def test_what_is_planned_is_what_it_takes(tiny_models: Path) -> None:
    """In passes of fixed shape, for texts as long as were planned."""
    target = open_target(str(tiny_models / TARGET))
    where, place, runtime = str(tiny_models / EAGLE3), Storage(4, 100), Graphed()
    head = open_head(where, target.config).load(torch.float32)
    stack = target.stack(dtype=torch.float32)
    Eagle3Plugin().prepare(head, stack)
    runtime.prepare(100, ())
    arms = make_arms(stack, {"eagle3": head}, {"m": CHAIN}, None, TextSettings(40), runtime=runtime)
    arms["m"](random_prompt(60), Streams(0))
    (own,) = (arena for arena in runtime._arenas.values() if arena.layers is head)
    weights, caches = (one.size for one in drafter_memory(KINDS["eagle3"], Eagle3Plugin(), where, target.config, place))
    held = load_file(tiny_models / EAGLE3 / "model.safetensors")
    assert weights == sum(tensor.nbytes for name, tensor in held.items() if name not in ("d2t", "t2d"))
    assert own.first_cache._buffer is not None
    buffers = sum(buffer.nbytes for buffer in own.buffers.values())
    (arena,) = (arena for arena in runtime._arenas.values() if arena.layers is stack)
    (taps,) = (buffer for (name, output), buffer in arena.buffers.items() if "aux_hidden" in name and output == 2)
    taken = own.first_cache._buffer.nbytes + buffers + taps.nbytes
    assert taken <= caches < taken + cache_bytes(target.config, place)


def test_a_target_without_layers_is_reported_tuned_and_resumed(
    models: Path, config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    price(monkeypatch, costs(step=40.0))  # of which auto allows itself not even a trial
    fixed = MethodConfig("skip_layers", skip=(1,), stop=StopConfig(max_draft=3))
    auto = replace(fixed, stop=StopConfig(max_draft="auto"))
    made = config("out", checkpoint=None, target=str(models / "target"), methods={"fixed": fixed, "auto": auto})
    evaluate(made, QUESTIONS)
    for report in json.loads((Path(made.out_dir) / "report.json").read_text())["reports"]:
        assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0
        assert (report["drafter"], report["settings"]["skip"]) == ("none", [1])
        assert (report["seconds"]["draft"] > 0) == (report["method"] == "fixed")
    with pytest.raises(UserError, match="other settings: methods"):
        evaluate(replace(made, methods={"fixed": replace(fixed, skip=(2,)), "auto": auto}, resume=True), QUESTIONS)

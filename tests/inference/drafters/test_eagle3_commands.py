"""An EAGLE-3 head in the commands: evaluated, reported, tuned, resumed, planned, rehearsed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.text.prompts import Prompt
from draft_models.eagle3.checkpoint import load_head
from draft_models.targets.open_target import open_target
from draft_models.targets.settings import EAGLE3, TARGET
from inference.drafters.eagle3 import PLUGIN
from inference.engines.graphs.cuda_graphs import Graphed
from inference.evaluate import compare
from inference.evaluate.compare import evaluate as command
from inference.loading.memory_plan import Place, cache_bytes, drafter_memory
from inference.measure import probe
from inference.measure.arms import make_arms
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS
from inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.errors import UserError
from outrider.streams import Streams
from tests.inference.evaluate.evaluating import evaluate
from tests.tiny import random_prompt

QUESTIONS = [Prompt("a", "text", ("once upon",), False), Prompt("b", "text", ("def add(",), False)]
CHAIN = MethodConfig("eagle3", stop=StopConfig(max_draft=3))


def test_it_is_reported_tuned_and_resumed(
    tiny_models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "SECONDS", 0.0)  # it measures for no longer than it must
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
    monkeypatch.setattr(compare, "load_models", None)  # it is refused before anything is loaded
    with pytest.raises(UserError, match=r"other settings: eagle3\.tensors\.fc"):
        evaluate(replace(made, resume=True), QUESTIONS)


def test_what_is_planned_is_what_it_takes(tiny_models: Path) -> None:
    """In passes of fixed shape, for texts as long as were planned."""
    target = open_target(str(tiny_models / TARGET))
    where, place, runtime = str(tiny_models / EAGLE3), Place(4, 100), Graphed()
    head = load_head(where, target.config, dtype=torch.float32)
    stack = target.stack(dtype=torch.float32)
    PLUGIN.prepare(head, stack)
    runtime.prepare(100, ())
    arms = make_arms(stack, {"eagle3": head}, {"m": CHAIN}, None, max_new_tokens=40, eos=(), runtime=runtime)
    arms["m"](random_prompt(60), Streams(0))
    (own,) = (arena for arena in runtime._arenas.values() if arena.layers is head)
    weights, caches = (one.size for one in drafter_memory(KINDS["eagle3"], PLUGIN, where, target.config, place))
    held = load_file(tiny_models / EAGLE3 / "model.safetensors")
    assert weights == sum(tensor.nbytes for name, tensor in held.items() if name not in ("d2t", "t2d"))
    assert own.first._buffer is not None
    buffers = sum(buffer.nbytes for buffer in own.buffers.values())
    (arena,) = (arena for arena in runtime._arenas.values() if arena.layers is stack)
    (taps,) = (buffer for (name, output), buffer in arena.buffers.items() if "aux_hidden" in name and output == 2)
    taken = own.first._buffer.nbytes + buffers + taps.nbytes
    assert taken <= caches < taken + cache_bytes(target.config, place)


def test_a_rehearsal_has_a_head(tmp_path: Path) -> None:
    command(
        EvaluateConfig(
            target="nowhere",
            eagle3="nowhere",
            methods={"m": CHAIN},
            debug=True,
            out_dir=str(tmp_path / "run"),
            compare_transformers=False,
        )
    )
    report = json.loads((tmp_path / "run-debug/run/report.json").read_text())
    assert report["drafter"].endswith(EAGLE3)
    assert report["drafted_tokens_per_round"] > 1

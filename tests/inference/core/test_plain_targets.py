"""Targets that cannot run layer by layer: drafters that do not use their layers work, with the same proof."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    MambaConfig,
    OPTConfig,
    PreTrainedConfig,
)

import outrider
from data_prep.text.settings import DataConfig
from draft_models.targets.open_target import load_tokenizer, open_target
from draft_models.targets.stack import LayerStack, RowCache, WholeModel
from draft_models.targets.target import Band
from inference.core.decode import autoregressive, speculative
from inference.drafters.ngram.lookup import PromptLookup
from inference.drafters.shaped import ModelDrafter
from inference.drafters.small_lm import SmallLMSource
from inference.loading.targets import find_setup, find_target, load_stack, make_runtime
from inference.settings.evaluate import EvaluateConfig
from inference.settings.method import MethodConfig
from inference.shapes.factory import make_structure
from outrider.errors import UserError
from outrider.streams import Streams
from tests.inference.evaluate.evaluating import evaluate
from tests.tiers import typical_where
from tests.tiny import STRUCTURES, byte_tokenizer, method_of, open_stack, random_prompt, reference_generate, save_target
from train.recipes.eagle3 import train_eagle3
from train.recipes.early_exit import train_early_exit
from train.settings.drafters import EesdConfig
from train.settings.eagle3 import Eagle3Config
from train.settings.fit import FitConfig

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": None, "pad_token_id": None}
ROTARY = {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 256}
TARGETS: dict[str, PreTrainedConfig] = {
    "falcon": FalconConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, **COMMON),
    "codegen": CodeGenConfig(**ROTARY, **COMMON),
    "gptj": GPTJConfig(**ROTARY, **COMMON),
}
LOOKUP = {"lookup": MethodConfig("prompt_lookup")}


def save(path: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


# Their calls differ little: one family is tested here, all in the thorough tier.
@pytest.fixture(scope="module", params=typical_where(lambda name: name == "falcon", sorted(TARGETS)))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LayerStack]:
    path = save(tmp_path_factory.mktemp(request.param), TARGETS[request.param])
    opened = open_target(str(path), by_layers=False)
    stack = load_stack(opened, None, torch.float32, CPU, by_layers=False)
    assert isinstance(stack, WholeModel)
    return path, stack


def of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("runtime", ["eager", "graphed"])
def test_greedy_equals_generate(
    target: tuple[Path, LayerStack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    """Plain decoding, prompt lookup, and a small LM's chains and trees; the prompt is longer than the largest mask."""
    monkeypatch.setattr(Band, "BLOCK", 16)
    path, stack = target
    small = open_stack(save_target(tmp_path / "small", kv_heads=2))[1]
    prompt = random_prompt(10) * 3
    expected = reference_generate(of(path), prompt, 24)
    options: Any = {"max_new_tokens": 24, "runtime": make_runtime(runtime, CPU)}
    drafters: list[Any] = [PromptLookup()]
    for structure in ("chain", "opt_tree", "k_config"):
        made = make_structure(method_of(STRUCTURES[structure]), Streams(0))
        drafters.append(ModelDrafter(SmallLMSource(small), made))
    assert [t for r in autoregressive(stack, prompt, **options) for t in r.tokens] == expected
    drafted = 0
    for drafter in drafters:
        rounds = list(speculative(stack, drafter, prompt, **options))
        assert [t for r in rounds for t in r.tokens] == expected
        drafted += sum(r.drafted for r in rounds)
    assert drafted > 60


def test_the_target_drafts_for_itself(target: tuple[Path, LayerStack]) -> None:
    """As a small LM, by its own forward: every draft is right, for any rows that a tree keeps."""
    path, stack = target
    prompt = random_prompt(14)
    for structure in ("chain", "static"):
        made = make_structure(method_of(STRUCTURES[structure]), Streams(0))
        source = SmallLMSource(WholeModel(of(path)))
        rounds = list(speculative(stack, ModelDrafter(source, made), prompt, max_new_tokens=21))
        assert [t for r in rounds for t in r.tokens] == reference_generate(of(path), prompt, 21)
        assert all(r.accepted == min(r.depth, len(r.tokens)) for r in rounds[1:])


def test_a_fault_in_what_is_kept_changes_the_text(
    target: tuple[Path, LayerStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above is sensitive to the caches: a tree's path is kept with rows off by one."""
    path, stack = target
    keep = RowCache.keep
    monkeypatch.setattr(RowCache, "keep", lambda self, base, rows: keep(self, base, [*rows[:1], *rows[:-1]]))
    source = SmallLMSource(WholeModel(of(path)))
    made = make_structure(method_of(STRUCTURES["static"]), Streams(0))
    rounds = list(speculative(stack, ModelDrafter(source, made), random_prompt(14), max_new_tokens=21))
    assert [t for r in rounds for t in r.tokens] != reference_generate(of(path), random_prompt(14), 21)


@pytest.mark.slow
def test_the_report(target: tuple[Path, LayerStack], tmp_path: Path, config: Callable[..., EvaluateConfig]) -> None:
    path, _ = target
    made = config(
        "out", target=str(path), checkpoint=None, small_lm=None, table=None, methods=LOOKUP, compare_transformers=True
    )
    evaluate(made)
    report = json.loads((Path(made.out_dir) / "report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0


def test_from_python(target: tuple[Path, LayerStack]) -> None:
    path, _ = target
    model = outrider.load(path, method="prompt_lookup", device="cpu")
    text = "abcabcabc"
    ids = load_tokenizer(str(path))(text)["input_ids"]
    expected = reference_generate(of(path), ids, 12)
    assert model.generate(text, max_new_tokens=12) == model.tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("name", [*TARGETS, "mamba", "opt"])
def test_a_drafter_that_needs_layers_is_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    """There are no weights here. The error names the family."""
    others = {"mamba": MambaConfig(), "opt": OPTConfig(do_layer_norm_before=False)}
    (TARGETS | others)[name].save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    said, data = {"target": str(tmp_path), "out_dir": str(tmp_path / "out")}, DataConfig()
    commands: list[Callable[[], object]] = [
        lambda: train_early_exit(EesdConfig(data=data, fit=FitConfig(steps=1), **said)),
        lambda: train_eagle3(Eagle3Config(data=data, fit=FitConfig(steps=1), **said)),
        lambda: find_setup(EvaluateConfig(methods={"m": MethodConfig("skip_layers")}, **said)),
        lambda: find_setup(EvaluateConfig(methods={"m": MethodConfig("eagle3")}, eagle3="head", **said)),
    ]
    by_name = f"architecture '{name}' cannot be run layer by layer"
    family = "an OPT with layer norms behind its layers" if name == "opt" else by_name
    for command in commands:
        with pytest.raises(UserError, match=family):
            command()


def test_a_drafter_on_layers_that_no_method_uses_is_refused_too(
    target: tuple[Path, LayerStack], config: Callable[..., EvaluateConfig]
) -> None:
    """It would be loaded with the target all the same."""
    made = config("out", target=str(target[0]), checkpoint=None, small_lm=None, table=None, methods=LOOKUP)
    assert find_target(made)
    with pytest.raises(UserError, match="cannot be run layer by layer"):
        find_target(replace(made, eagle3="head"))


def test_a_target_that_proves_neither_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, BloomConfig(hidden_size=64, n_layer=2, n_head=4, **COMMON))
    with pytest.raises(UserError, match=r"neither by layers nor by its own forward \(its forward does not take a 4-D"):
        load_stack(open_target(str(path), by_layers=False), None, torch.float32, CPU, by_layers=False)


def test_a_window_that_is_applied_unasked_is_refused(tmp_path: Path) -> None:
    """GPT-Neo's local layers apply their window to any mask, and by rows, not by positions."""
    kinds = [[["global", "local"], 1]]
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128}
    for window, refused in ((20, True), (128, False)):
        config = GPTNeoConfig(**shape, attention_types=kinds, window_size=window, **COMMON)
        target = open_target(str(save(tmp_path / str(window), config)), by_layers=False)
        if refused:
            with pytest.raises(UserError, match=r"neither by layers nor .* a branch of a tree|token \d+ of a text of"):
                load_stack(target, None, torch.float32, CPU, by_layers=False)
        else:
            assert load_stack(target, None, torch.float32, CPU, by_layers=False)

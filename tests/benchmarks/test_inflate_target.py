"""An inflated target is the same function, drafted for with the same success; a wrong step of it shows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider.base.errors import UserError
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.settings import EARLY_EXIT, SMALL_LM, TARGET
from outrider.inference.settings.method import MethodConfig, StopConfig
from tests.refusals import refusal
from tests.tiny import byte_tokenizer, random_prompt, save_exit, save_target, shake_norms_and_biases, unproven

TOLERANCE = 1e-5
TOKENS = 20
PROMPTS = (random_prompt(12), random_prompt(9))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "llama, tied, one key head": {"kv_heads": 1, "tied": True},
    "llama, biases": {"kv_heads": 4, "attention_bias": True, "mlp_bias": True},
    "llama, llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"kv_heads": 2},
    "qwen2": {"kv_heads": 2},
}  # fmt: skip


def family(path: Path, name: str) -> Path:
    """A tiny target of `FAMILIES` whose norms and biases are all different, and whose logits are of ordinary size."""
    save_target(path, name.partition(",")[0], **FAMILIES[name])
    shake_norms_and_biases(path)
    return path


def difference(before: Path, after: Path) -> float:
    """The largest difference of logits, as a share of their spread if that is more than 1."""
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (before, after)]
    with torch.no_grad():
        first, second = (model(torch.tensor([random_prompt(40)])).logits for model in models)
    return float((first - second).abs().max()) / max(1.0, float(first.std()))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_logits_and_the_text_stay(tmp_path: Path, name: str) -> None:
    from inflate_target import SHAPES, inflate

    source, shape = family(tmp_path / "source", name), SHAPES["tiny-test"]
    inflate(str(source), shape, tmp_path / "out")
    wide = tmp_path / "out" / TARGET
    config = open_target(str(wide)).config
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (168, 6, 32)
    assert difference(source, wide) < TOLERANCE


def first_keys(change: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Query heads in order, without regard to their key heads."""
    queries, keys = torch.arange(change.wide.heads), torch.arange(change.wide.key_heads)
    return (torch.where(queries < change.narrow.heads, queries, -1),
            torch.where(keys < change.narrow.key_heads, keys, -1))  # fmt: skip


def side_by_side(change: Any) -> torch.Tensor:
    """Pairs in the first places of each half."""
    places = torch.full((2, change.wide.head_dim // 2), -1)
    places[:, : change.narrow.head_dim // 2] = torch.arange(change.narrow.head_dim).view(2, -1)
    return places.flatten()


def in_one_half(change: Any) -> torch.Tensor:
    narrow, wide = change.narrow.head_dim, change.wide.head_dim
    return torch.cat([torch.arange(narrow), torch.full((wide - narrow,), -1)])


FAULTS: dict[str, dict[str, Any]] = {
    "epsilon not rescaled": {"epsilon": lambda change, given: given},
    "norms not rescaled": {"factor": lambda change, part: 2**0.5 if part == "q_proj" else 1.0},
    "queries not rescaled": {"factor": lambda change, part: 1.0 if part == "q_proj" else (64 / 168) ** 0.5},
    "pairs of other frequencies": {"pairs": side_by_side},
    "halves of pairs apart": {"pairs": in_one_half},
    "query heads under other keys": {"heads": first_keys},
    "padding that is not silent": {
        "widened": lambda change, block, rows, columns: block[rows % len(block)][:, columns]
    },
    "a further layer that adds something": {"silenced": lambda change, outputs: outputs},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_step_shows(tmp_path: Path, fault: str) -> None:
    from inflate_target import SHAPES, Inflation, inflate

    source, wrong = family(tmp_path / "source", "llama"), type("Wrong", (Inflation,), FAULTS[fault])
    with unproven():
        inflate(str(source), SHAPES["tiny-test"], tmp_path / "out", inflation=wrong)
        assert difference(source, tmp_path / "out" / TARGET) > 3 * TOLERANCE


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and a drafter of each kind that is right now and then."""
    folder = tmp_path_factory.mktemp("drafted")
    where = {name: folder / name for name in (TARGET, EARLY_EXIT, SMALL_LM)}
    save_target(where[TARGET], kv_heads=2, hidden_size=128)
    shake_norms_and_biases(where[TARGET])
    save_exit(where[EARLY_EXIT], where[TARGET], 2, noise=0.05)
    model = AutoModelForCausalLM.from_pretrained(where[TARGET])
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4))
    model.save_pretrained(where[SMALL_LM])
    byte_tokenizer().save_pretrained(where[SMALL_LM])
    return where


METHODS = {source: MethodConfig(source=source, stop=StopConfig(max_draft=4)) for source in (EARLY_EXIT, SMALL_LM)}


def rounds_of(where: Mapping[str, Path]) -> dict[str, list[tuple[int, ...]]]:
    """By method: tokens, drafted, accepted and depth of every round."""
    found = {}
    for name, method in METHODS.items():
        exits, given = method.source == EARLY_EXIT, {SMALL_LM: str(where[SMALL_LM])}
        source, given = (EARLY_EXIT, {TARGET: str(where[TARGET])}) if exits else (TARGET, given)
        model = outrider.load(where[source], method=method, dtype="float32", runtime="eager", template="none", **given)
        rounds = [r for prompt in PROMPTS for r in model.rounds(prompt, max_new_tokens=TOKENS)]
        found[name] = [(*r.tokens, r.drafted, r.accepted, r.depth) for r in rounds]
    return found


@pytest.mark.parametrize("wrong", ["", EARLY_EXIT, pytest.param(SMALL_LM, marks=pytest.mark.thorough)])
def test_acceptance_is_equal_round_by_round(drafted: dict[str, Path], tmp_path: Path, wrong: str) -> None:
    """wrong: a drafter whose query heads are under other keys than they were. The text stays, its rounds do not."""
    from inflate_target import Inflation, Shape, inflate, inflate_early_exit, inflate_small_lm, shape_of

    shape, small, out = Shape(192, 6, 12, 4, 32, 224), Shape(160, 5, 8, 4, 64, 128), tmp_path / "out"
    given: dict[str, Any] = {"early_exit": drafted[EARLY_EXIT], "small_lm": drafted[SMALL_LM]}
    inflate(str(drafted[TARGET]), shape, out, small_shape=small, **given)
    where, faulty = {name: out / name for name in drafted}, type("Wrong", (Inflation,), {"heads": first_keys})
    before, after = str(drafted[TARGET]), str(where[TARGET])
    if wrong:
        where[wrong] = out / "wrong"
        if wrong == SMALL_LM:
            inflate_small_lm(drafted[SMALL_LM], where[wrong], shape, inflation=faulty)
        else:
            change = faulty(shape_of(open_target(before).config), shape)
            inflate_early_exit(drafted[EARLY_EXIT], where[wrong], before, after, change)
    assert difference(drafted[TARGET], where[TARGET]) < TOLERANCE
    first, second = rounds_of(drafted), rounds_of(where)
    for name in METHODS:
        texts = [[token for *text, _, _, _ in rounds[name] for token in text] for rounds in (first, second)]
        assert texts[0] == texts[1]
        assert (first[name] == second[name]) == (name != wrong), name
        assert sum(accepted for *_, accepted, _ in first[name]) >= 2, name
    with pytest.raises(UserError, match="trained for another target"):
        inflate_early_exit(drafted[EARLY_EXIT], tmp_path / "no", after, after, Inflation(shape, shape))
    refusal("not empty", inflate, str(drafted[TARGET]), shape, out)


@pytest.mark.parametrize(("architecture", "changes", "said"), [
    ("opt", {}, "expected one of llama"),
    ("llama", {"num_hidden_layers": 7}, "does not fit .*layers"),
    ("llama", {"hidden_size": 176}, "does not fit .*width"),
    ("llama", {"head_dim": 24}, "does not fit .*head_dim"),
    ("llama", {"num_attention_heads": 8, "kv_heads": 8, "head_dim": 16}, "does not fit .*key_heads"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "cannot be inflated"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "cannot be"),
])  # fmt: skip
def test_what_cannot_be_inflated_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], said: str
) -> None:
    """Before any weight is written."""
    from inflate_target import SHAPES, inflate

    source = save_target(tmp_path / "source", architecture, **changes)
    refusal(said, inflate, str(source), SHAPES["tiny-test"], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())

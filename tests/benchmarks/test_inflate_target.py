"""An inflated target is the same function, drafted for with the same success; a wrong step of it shows."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.base.errors import UserError
from outrider.draft_models.calibration import drafter_digest, load_calibration
from outrider.draft_models.eagle3.checkpoint import new_head, open_head, save_head
from outrider.draft_models.eagle3.reading import default_taps, new_reading
from outrider.draft_models.early_exit.checkpoint import read_meta, save_pretrained
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.settings import EAGLE3, EARLY_EXIT, HEAD_FOLDER, SMALL_LM, TARGET
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.draft_models.tiny.models import save_tiny_models
from outrider.inference.core.decode import autoregressive
from tests.fitted_heads import fitted_head
from tests.tiny import make_drafter, random_prompt, reference_generate, save_target, shake_norms_and_biases, unproven

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
    "qwen3": {"kv_heads": 2, "rms_norm_eps": 1e-3},
}  # fmt: skip


def family(path: Path, name: str) -> Path:
    """A tiny target of `FAMILIES` whose norms and biases are all different, and whose logits are of ordinary size."""
    save_target(path, name.partition(",")[0], **FAMILIES[name])
    shake_norms_and_biases(path)
    return path


def difference(before: Path, after: Path) -> float:
    """The largest difference of logits, as a share of their spread if that is more than 1."""
    from inflate_target import logits_of

    stacks = [open_target(str(path)).stack(dtype=torch.float32) for path in (before, after)]
    first, second = (logits_of(stack, random_prompt(40)) for stack in stacks)
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
    model = AutoModelForCausalLM.from_pretrained(source)
    stack = open_target(str(wide)).stack(dtype=torch.float32)
    said = [token for r in autoregressive(stack, PROMPTS[0], max_new_tokens=TOKENS) for token in r.tokens]
    assert said == reference_generate(model, PROMPTS[0], TOKENS)


def no_norms(*_: object) -> dict[str, float]:
    return {"q_proj": 2**0.5}


def no_query(narrow: Any, wide: Any, head_norms: bool) -> dict[str, float]:
    from inflate_target import STREAM_NORMS

    return dict.fromkeys(STREAM_NORMS, (narrow.width / wide.width) ** 0.5)


def side_by_side(narrow: int, wide: int) -> torch.Tensor:
    """Pairs in the first places of each half."""
    places = torch.full((2, wide // 2), -1)
    places[:, : narrow // 2] = torch.arange(narrow).view(2, -1)
    return places.flatten()


def in_one_half(narrow: int, wide: int) -> torch.Tensor:
    return torch.cat([torch.arange(narrow), torch.full((wide - narrow,), -1)])


def first_keys(narrow: Any, wide: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Query heads in order, without regard to their key heads."""
    queries, keys = torch.arange(wide.heads), torch.arange(wide.key_heads)
    return torch.where(queries < narrow.heads, queries, -1), torch.where(keys < narrow.key_heads, keys, -1)


FAULTS: dict[str, tuple[str, Callable[..., object]]] = {
    "epsilon not rescaled": ("epsilon", lambda narrow, wide, given: given),
    "norms not rescaled": ("factors", no_norms),
    "queries not rescaled": ("factors", no_query),
    "pairs of other frequencies": ("pair_places", side_by_side),
    "halves of pairs apart": ("pair_places", in_one_half),
    "query heads under other keys": ("head_places", first_keys),
    "padding that is not silent": ("widened", lambda block, rows, columns: block[rows % len(block)][:, columns]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_step_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    import inflate_target

    source = family(tmp_path / "source", "llama")
    monkeypatch.setattr(inflate_target, *FAULTS[fault])
    with unproven():
        inflate_target.inflate(str(source), inflate_target.SHAPES["tiny-test"], tmp_path / "out")
        assert difference(source, tmp_path / "out" / TARGET) > 3 * TOLERANCE


def test_a_further_layer_that_adds_something_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import inflate_target

    source, apply = family(tmp_path / "source", "llama"), inflate_target.Inflation.apply
    monkeypatch.setattr(inflate_target.Inflation, "apply", lambda *given, silent=False: apply(*given))
    inflate_target.inflate(str(source), inflate_target.SHAPES["tiny-test"], tmp_path / "out")
    assert difference(source, tmp_path / "out" / TARGET) > 3 * TOLERANCE


def test_a_norm_of_heads_needs_its_own_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its epsilon is that of the other norms, and not what its width asks for."""
    import inflate_target

    source, factors = family(tmp_path / "source", "qwen3"), inflate_target.factors

    def same_as_others(narrow: Any, wide: Any, head_norms: bool) -> dict[str, float]:
        return factors(narrow, wide, head_norms) | {"q_proj": 1.0, "k_proj": 1.0}

    monkeypatch.setattr(inflate_target, "factors", same_as_others)
    inflate_target.inflate(str(source), inflate_target.SHAPES["tiny-test"], tmp_path / "out")
    assert difference(source, tmp_path / "out" / TARGET) > 3 * TOLERANCE


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and a drafter of each kind that is right now and then."""
    folder = tmp_path_factory.mktemp("drafted")
    where = {name: folder / name for name in (TARGET, EARLY_EXIT, SMALL_LM, EAGLE3)}
    save_target(where[TARGET], kv_heads=2, hidden_size=128)
    shake_norms_and_biases(where[TARGET])
    target = open_target(str(where[TARGET]))
    exits = make_drafter(where[TARGET], 2, noise=0.05)
    save_pretrained(where[EARLY_EXIT], exits, target.fingerprint, {}, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(where[TARGET])
    answers = [(prompt, reference_generate(model, prompt, TOKENS)) for prompt in PROMPTS]
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4))
    model.save_pretrained(where[SMALL_LM])
    target.tokenizer.save_pretrained(where[SMALL_LM])
    head = fitted_head(target.stack(dtype=torch.float32), answers, hidden=128)
    save_head(where[EAGLE3], head, "speculators", target.config, TARGET)
    return where


def test_acceptance_is_equal_round_by_round(drafted: dict[str, Path], tmp_path: Path) -> None:
    from inflate_target import Shape, check, inflate

    drafters = {name: path for name, path in drafted.items() if name != TARGET}
    shape, small = Shape(192, 6, 12, 4, 32, 224), Shape(160, 5, 8, 4, 64, 128)
    out = tmp_path / "out"
    inflate(str(drafted[TARGET]), shape, out, small_shape=small, **drafters)
    found = check(drafted, {name: out / name for name in drafted}, PROMPTS, TOKENS, torch.float32)
    assert found["logits"] < TOLERANCE * max(1.0, found["logits_spread"])
    assert found["texts"] == [2, 2]
    assert len(found["rounds"]) == 6
    for name, (equal, rounds) in found["rounds"].items():
        assert equal == rounds > 0
        accepted, again = found["accepted"][name]
        assert accepted == again
        assert accepted >= 2, name
    with pytest.raises(UserError, match="trained for another target"):
        check(drafted, {TARGET: out / TARGET, EARLY_EXIT: drafted[EARLY_EXIT]}, PROMPTS, 1, torch.float32)


@pytest.mark.parametrize("name", [EAGLE3, EARLY_EXIT, pytest.param(SMALL_LM, marks=pytest.mark.thorough)])
def test_a_wrong_drafter_shows(
    drafted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its query heads are under other keys than they were: the text stays, the rounds do not."""
    import inflate_target

    shape, before = inflate_target.Shape(192, 6, 12, 4, 32, 224), open_target(str(drafted[TARGET]))
    change = inflate_target.inflate_model(before.source, tmp_path / TARGET, shape, None, TARGET)
    monkeypatch.setattr(inflate_target, "head_places", first_keys)
    pair = inflate_target.Pair(before, open_target(str(tmp_path / TARGET)), replace(change), None)
    sizes = (replace(shape, layers=4),) if name == SMALL_LM else ()
    getattr(inflate_target, f"inflate_{name}")(drafted[name], tmp_path / name, pair, *sizes)
    both = [{kind: where[kind] for kind in (TARGET, name)} for where in (drafted, {n: tmp_path / n for n in drafted})]
    found = inflate_target.check(*both, PROMPTS, TOKENS, torch.float32)
    assert found["texts"] == [2, 2]
    assert all(equal < rounds for equal, rounds in found["rounds"].values())


def test_a_head_that_names_no_taps_keeps_them(tmp_path: Path) -> None:
    """EAGLE's dialect leaves them to the number of layers, which is another one now."""
    from inflate_target import SHAPES, inflate

    source, head = save_target(tmp_path / "source", kv_heads=2, num_hidden_layers=8), tmp_path / "head"
    target = open_target(str(source))
    reading = new_reading(target.config, taps=(), version="3", draft_vocabulary=None, intermediate=None)
    made = new_head(reading, target.stack(dtype=torch.float32), None, 0)
    save_head(head, made, "specforge", target.config, TARGET)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({key: config[key] for key in config if "eagle" not in key}))
    assert open_head(str(head), target.config).reading.taps == (2, 4, 5)
    inflate(str(source), replace(SHAPES["tiny-test"], layers=10), tmp_path / "out", eagle3=head)
    config = open_target(str(tmp_path / "out" / TARGET)).config
    assert default_taps(config.num_hidden_layers) == (2, 5, 7)
    assert open_head(str(tmp_path / "out" / EAGLE3), config).reading.taps == (2, 4, 5)


def test_the_command_carries_calibration_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are bound to the inflated target and drafter, and say the same of padded hidden states."""
    import inflate_target

    save_tiny_models(tmp_path, "llama", None)
    for name in (EARLY_EXIT, SMALL_LM, EAGLE3):
        assert list((tmp_path / name).rglob("calibration.json"))
    out, kinds = tmp_path / "out", (EARLY_EXIT, SMALL_LM, EAGLE3)
    given = [word for name in kinds for word in (f"--{name.replace('_', '-')}", tmp_path / name)]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "to be "}) + "\n")
    options = ["--target", tmp_path / TARGET, "--shape", "tiny-test", "--small-shape", "tiny-test", "--out", out]
    options += [*given, "--check", tmp_path / "prompts.jsonl", "--tokens", 6]
    monkeypatch.setattr(sys, "argv", ["inflate_target", *map(str, options)])
    inflate_target.main()
    record = json.loads((out / "inflated.json").read_text())
    assert record["first_line"].startswith("Inflated: what is accepted is")
    assert record["check"]["logits"] < TOLERANCE
    assert all(equal == rounds for equal, rounds in record["check"]["rounds"].values())
    identity = model_identity(open_target(str(out / TARGET)).files)
    for name in kinds:
        folder = "" if name == EARLY_EXIT else HEAD_FOLDER
        digest = drafter_digest(open_tensors(str(out / name))) if folder else read_meta(out / name).weights_sha256
        head = load_calibration(out / name, digest, target=identity, folder=folder)
        assert (head.target.shape[1], len(head.draft)) == (168, 168)
    with pytest.raises(SystemExit):
        inflate_target.main()  # the folder is not empty


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("opt", {}, "expected one of llama"),
        ("llama", {"num_hidden_layers": 7}, "does not fit .*layers"),
        ("llama", {"hidden_size": 176}, "does not fit .*width"),
        ("llama", {"head_dim": 24}, "does not fit .*head_dim"),
        ("llama", {"num_attention_heads": 8, "kv_heads": 8, "head_dim": 16}, "does not fit .*key_heads"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "cannot be inflated"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "cannot be"),
    ],
)
def test_what_cannot_be_inflated_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], said: str
) -> None:
    """Before any weight is written."""
    from inflate_target import SHAPES, inflate

    source = save_target(tmp_path / "source", architecture, **changes)
    with pytest.raises(UserError, match=said):
        inflate(str(source), SHAPES["tiny-test"], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())

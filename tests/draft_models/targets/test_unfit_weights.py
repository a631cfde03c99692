"""Weights that do not fit, in every place that loads a model: refused by name, or read as transformers reads them."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import outrider
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.draft_vocabulary import TOKENS_FILE, read_draft_vocabulary
from outrider.draft_models.eagle3.checkpoint import open_head
from outrider.draft_models.early_exit.checkpoint import (
    WEIGHTS_FILE,
    from_pretrained,
    read_draft_tokens,
    read_meta,
    write_meta,
)
from outrider.draft_models.formats import convert
from outrider.draft_models.small_lm.model import load_for_engine, load_small_lm
from outrider.draft_models.targets import open_target as opening
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.narrowed import MARK
from outrider.draft_models.targets.open_target import load_config, open_target
from outrider.draft_models.targets.tensor_files import TensorFiles, open_tensors
from outrider.inference.batch.responder import load_target
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.loading.models import load_reference, load_stack
from outrider.train.parts.initial_lm import start_lm
from outrider.train.settings.drafters import DrafterConfig
from tests.eagle3_heads import DIALECTS, TARGET, head_weights, write_head
from tests.pairwise import each_value
from tests.refusals import refusal
from tests.tiers import quick_where, typical_where
from tests.tiny import LAYERS, byte_tokenizer, save_exit, save_target
from tests.train.jobs import finetuning

CPU, FLOAT = torch.device("cpu"), torch.float32
HEAD, EMBEDDING, LAST = "lm_head.weight", "model.embed_tokens.weight", f"model.layers.{LAYERS - 1}.mlp.up_proj.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
State = dict[str, Tensor]


def first_layers(source: str) -> object:
    return open_target(source).layers([0], dtype=FLOAT)


def as_evaluated(source: str) -> object:
    target = open_target(source)
    return load_stack(target, load_reference(target, FLOAT, CPU), FLOAT, CPU, by_layers=True)


def run_as_a_whole(source: str) -> object:
    return load_stack(open_target(source, by_layers=False), None, FLOAT, CPU, by_layers=False)


def answering(source: str) -> object:
    config = GenerateConfig(target=source, data=DataConfig())
    return load_target(config, open_target(source, by_layers=False), FLOAT, CPU)


def finetuned(source: str) -> object:
    drafter = DrafterConfig(path=source)
    config = replace(finetuning(Path(source), DataConfig(), Path("out")), drafter=drafter)
    return start_lm(config, load_config(source, role="drafter.path"), byte_tokenizer(), CPU)


LOADERS: dict[str, Callable[[str], object]] = {
    "train, calibrate": lambda source: open_target(source).stack(dtype=FLOAT),
    "eesd": first_layers,
    "evaluate-checkpoint": as_evaluated,
    "by_layers=false": run_as_a_whole,
    "audit": lambda source: load_reference(open_target(source, by_layers=False), FLOAT, CPU),
    "generate-responses": answering,
    "outrider.load": lambda source: outrider.load(source, device="cpu", dtype="float32").stack,
    "small_lm": lambda source: load_small_lm(source, byte_tokenizer(), dtype=FLOAT),
    "export": lambda source: load_for_engine(source, byte_tokenizer(), FLOAT, None),
    "finetune-drafter": finetuned,
}


def altered(path: Path, change: Callable[[State], State]) -> None:
    save_file(change(load_file(path / FILE)), path / FILE, metadata={"format": "pt"})


def described(path: Path, **changes: object) -> None:
    found = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(found | changes))


def under(prefix: str, begins: str = "") -> Callable[[Path], None]:
    return lambda path: altered(path, lambda state: {prefix * n.startswith(begins) + n: t for n, t in state.items()})


def without(*names: str) -> Callable[[Path], None]:
    return lambda path: altered(path, lambda state: {name: state[name] for name in state.keys() - set(names)})


def tied_but_two(path: Path) -> None:
    described(path, tie_word_embeddings=True)


def of_another_shape(path: Path) -> None:
    altered(path, lambda state: state | {LAST: state[LAST].T.contiguous()})


def codes(dtype: torch.dtype, *, pickled: bool = False) -> Callable[[Path], None]:
    """Quantised weights, of which nothing says how."""
    rest = {f"{LAST.removesuffix('weight')}weight_scale": torch.ones(1)}

    def spoil(path: Path) -> None:
        altered(path, lambda state: state | rest | {LAST: (100 * state[LAST]).to(dtype)})
        if pickled:
            torch.save(load_file(path / FILE), path / "pytorch_model.bin")
            (path / FILE).unlink()

    return spoil


def wrapped_with_a_rest(path: Path) -> None:
    altered(path, lambda state: {f"module.{n}": t for n, t in (state | {"v_head.weight": torch.ones(2)}).items()})


def in_shards(path: Path, *, twice: str = "", missing: str = "") -> None:
    """Two files; `twice` is in both, with other values; the file `missing` is not there."""
    state = load_file(path / FILE)
    file_of = {name: "a" if place % 2 else "b" for place, name in enumerate(sorted(state))}
    for file in {"a", "b"} - {missing}:
        inside = {name: tensor for name, tensor in state.items() if file_of[name] == file}
        save_file(inside | ({twice: state[twice] + 1} if twice and file_of[twice] != file else {}),
                  path / f"{file}.safetensors", metadata={"format": "pt"})  # fmt: skip
    (path / INDEX).write_text(json.dumps({"weight_map": {name: f"{one}.safetensors" for name, one in file_of.items()}}))
    (path / FILE).unlink()


def adapter_beside(path: Path) -> None:
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/base"}))


def adapter_alone(path: Path) -> None:
    adapter_beside(path)
    (path / "config.json").unlink()
    (path / FILE).rename(path / "adapter_model.safetensors")


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor is missing": (without(LAST), LAST),
    "the head is missing": (without(HEAD), rf"no {HEAD}.*tie_word_embeddings"),
    "the embedding is missing": (without(EMBEDDING), EMBEDDING),
    "another shape": (of_another_shape, rf"{LAST} of shape \[64, 96\], not \[96, 64\]"),
    "tied, but two": (tied_but_two, rf"{HEAD} and {EMBEDDING} differ, which are tied"),
    "layers with a prefix": (under("_orig_mod.", "model.layers"), r"no model\.layers.*with the prefix _orig_mod\."),
    "an unknown prefix": (under("policy."), r"no .*with the prefix policy\."),
    "a wrapper, and a rest": (wrapped_with_a_rest, r"not known: v_head\.weight"),
    "integers": (codes(torch.int8), rf"{LAST}: weights stored as codes \(I8\)"),
    "packed integers": (codes(torch.int32), rf"{LAST}: weights stored as codes \(I32\)"),
    "floats of 8 bits": (codes(torch.float8_e4m3fn), rf"{LAST}: weights stored as codes \(F8_E4M3\)"),
    "pickled codes": (codes(torch.float8_e5m2, pickled=True), rf"{LAST}: weights stored as codes \(F8_E5M2\)"),
    "fnuz": (codes(torch.float8_e4m3fnuz, pickled=True), rf"{LAST}.*float8_e4m3fnuz"),
    "a missing file": (lambda path: in_shards(path, missing="a"), r"a\.safetensors"),
    "a tensor in two files": (lambda path: in_shards(path, twice=EMBEDDING), EMBEDDING),
    "an adapter alone": (adapter_alone, r"adapter for some/base.*merge it first.*merge_and_unload"),
    "an adapter beside a model": (adapter_beside, r"adapter for some/base.*merge it first"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("models") / "plain")


UNFIT = [*itertools.product(REFUSED, LOADERS)]


@pytest.mark.parametrize(("case", "loader"), typical_where(each_value(UNFIT).__contains__, UNFIT))
def test_what_does_not_fit_is_refused_by_every_command(plain: Path, tmp_path: Path, case: str, loader: str) -> None:
    """It names the tensor; nowhere is it run as a whole, with random numbers in the place of what is missing."""
    path = Path(shutil.copytree(plain, tmp_path / "model"))
    spoil, named = REFUSED[case]
    spoil(path)
    refusal(named, LOADERS[loader], str(path))


def both_files(path: Path) -> None:
    """Shards beside a whole file, which transformers reads."""
    whole = load_file(path / FILE)
    altered(path, lambda state: {name: 2 * tensor for name, tensor in state.items()})
    in_shards(path)
    save_file(whole, path / FILE, metadata={"format": "pt"})


def pickled(path: Path) -> None:
    torch.save(
        {f"module.{name}": tensor for name, tensor in load_file(path / FILE).items()}, path / "pytorch_model.bin"
    )
    (path / FILE).unlink()


def head_alone(path: Path) -> None:
    """Tied, but it is the head that was saved."""
    described(path, tie_word_embeddings=True)
    without(EMBEDDING)(path)


def tied_and_equal(path: Path) -> None:
    described(path, tie_word_embeddings=True)
    altered(path, lambda state: state | {HEAD: state[EMBEDDING].clone()})


def embedding_alone(path: Path) -> None:
    described(path, tie_word_embeddings=True)
    without(HEAD)(path)


READ: dict[str, tuple[Callable[[Path], None], str | None]] = {
    **{prefix: (under(prefix), "wrapped") for prefix in ("_orig_mod.", "module.", "base_model.model.")},
    "module._orig_mod.": (under("module._orig_mod."), "wrapped"),
    "module. in .bin": (pickled, "wrapped"),
    "one file and shards": (both_files, None),
    "tied, and twice the same": (tied_and_equal, EMBEDDING),
    "tied, without a head": (embedding_alone, EMBEDDING),
    "tied, without an embedding": (head_alone, HEAD),
}


@pytest.mark.parametrize("case", quick_where(lambda case: case == "module.", list(READ)))
def test_what_fits_is_one_model_for_us_and_for_transformers(
    plain: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a wrapper put before all names is left out, which is said once, and the same target has one fingerprint."""
    path = Path(shutil.copytree(plain, tmp_path / "model"))
    change, known = READ[case]
    change(path)
    expected = load_file(plain / FILE)
    if known not in (None, "wrapped"):
        expected |= dict.fromkeys((HEAD, EMBEDDING), expected[known])
    target = open_target(str(path))
    for model in (target.layers(dtype=FLOAT), load_causal_lm(str(path), dtype=FLOAT)):
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == case.startswith("tied")
        model.save_pretrained(tmp_path / "saved")
        assert not any(name.startswith("module") for name in load_file(tmp_path / "saved" / FILE))
    if known == "wrapped":
        assert target.fingerprint.tensors == open_target(str(plain)).fingerprint.tensors
        assert capsys.readouterr().err.count("the names of its tensors begin with") == 1


def test_a_model_that_the_hub_gave_is_not_called_absent(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = {file.name: str(file) for file in plain.iterdir()}
    monkeypatch.setattr(convert, "cached_file", lambda _, file, **options: path.get(file))
    monkeypatch.setattr(convert, "has_file", lambda _, file, **options: file in path)
    refusal(r"target=hub/unusable: no usable config\.json", open_target, "hub/unusable")


def test_a_missing_file_of_other_layers_is_no_matter_to_an_early_exit(plain: Path, tmp_path: Path) -> None:
    """It trains on the first layers; whoever needs the rest is refused."""
    path = save_target(tmp_path / "model", shard="40KB")
    file = open_tensors(str(path)).file_of[LAST]
    (path / file).unlink()
    open_target(str(path)).layers([0], dtype=FLOAT)
    refusal(file, open_target(str(path)).layers, dtype=FLOAT)


def test_a_model_saved_without_its_head_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Also where an architecture calls its layers otherwise than most; all of them, and some."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model("gpt_neox", vocab_size=260, bos_token_id=None, eos_token_id=None, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    altered(tmp_path, lambda state: {name.removeprefix("gpt_neox."): tensor for name, tensor in state.items()})
    whole = load_causal_lm(str(tmp_path), dtype=FLOAT).state_dict()
    ours = open_target(str(tmp_path)).layers(dtype=FLOAT).state_dict()
    torch.testing.assert_close(ours, whole, rtol=0, atol=0)
    second = open_target(str(tmp_path)).layers([1], dtype=FLOAT).state_dict()
    name = "gpt_neox.layers.{}.mlp.dense_h_to_4h.weight"
    assert torch.equal(second[name.format(0)], whole[name.format(1)])


QUERY = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets are too large to be loaded twice: of one the first layer is compared."""
    monkeypatch.setattr(opening, "LARGEST_COPY", 0)


@pytest.fixture(params=[False, True])
def of_any_size(request: pytest.FixtureRequest) -> None:
    if request.param:
        request.getfixturevalue("large")


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize(
    "unread", [f"{QUERY}.bias", f"{QUERY}.lora_A.weight", f"{QUERY}.weight_scale", "v_head.weight"]
)
def test_what_transformers_passes_over_is_told_once(plain: Path, tmp_path: Path, capsys: Any, unread: str) -> None:
    """The model is without it; who does not know of it takes that for the model that was saved."""
    path = Path(shutil.copytree(plain, tmp_path / "model"))
    altered(path, lambda state: state | {unread: torch.ones(64)})
    for loader in ("eesd", "train, calibrate", "evaluate-checkpoint", "outrider.load"):
        LOADERS[loader](str(path))
    assert capsys.readouterr().err.count(f"{unread}: not read") == 1
    LOADERS["small_lm"](str(path))
    assert f"small_lm={path}: {unread}: not read" in capsys.readouterr().err


def test_weights_that_are_no_numbers_are_called_that(plain: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(plain, tmp_path / "model"))
    altered(path, lambda state: state | {LAST: state[LAST] * torch.nan})
    for loader in ("train, calibrate", "evaluate-checkpoint", "by_layers=false", "small_lm", "outrider.load"):
        refusal("no numbers", LOADERS[loader], str(path))


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("name", [EMBEDDING, HEAD, "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_tensor_of_ours_that_is_not_transformers_own_is_refused(
    plain: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By one bit."""
    read = TensorFiles._read

    def off(files: TensorFiles, one: str, stored: Any) -> Tensor:
        tensor = read(files, one, stored)
        if one == name:
            tensor.view(torch.uint8).view(-1)[0] ^= 1
        return tensor

    monkeypatch.setattr(TensorFiles, "_read", off)
    for load in ("train, calibrate", "eesd", "evaluate-checkpoint", "small_lm", "outrider.load", "finetune-drafter"):
        refusal(f"{name} is another tensor than the one that transformers loads", LOADERS[load], str(plain))


def spoilt(folder: Path, name: str, tensors: State) -> None:
    """Replace the file `name` of an early exit by `tensors`, with the digest that its description then has."""
    save_file(tensors, folder / name)
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    write_meta(folder, replace(read_meta(folder), weights_sha256=digest))


@pytest.mark.parametrize("ids", [[0, 7, 10**6], [-1, 3, 9], [9, 3, 7], [3, 3, 7], [3, 7], None, [0.0, 3.0, 7.0]])
def test_draft_tokens_that_are_none_of_the_targets_are_refused(
    plain: Path, tmp_path: Path, ids: list[Any] | None
) -> None:
    """Of an early exit and of a small LM: outside the vocabulary, not ascending, too few, missing, no integers."""
    target, right = open_target(str(plain)), torch.tensor([3, 7, 9])
    save_exit(tmp_path, plain, 1, tokens=right)
    assert read_draft_tokens(tmp_path) == right.tolist()
    state = load_file(tmp_path / WEIGHTS_FILE)
    del state["draft_tokens"]
    spoilt(tmp_path, WEIGHTS_FILE, state | ({} if ids is None else {"draft_tokens": torch.tensor(ids)}))
    config = load_config(str(plain))
    for read in (read_draft_tokens, lambda path: from_pretrained(path, config, target.fingerprint, dtype=FLOAT)):
        refusal("expected 3 ascending token ids below 260", read, tmp_path)
    if ids is not None:
        save_file({"tokens": torch.tensor(ids)}, tmp_path / TOKENS_FILE, metadata={"of": str(config.vocab_size)})
        config.vocab_size = len(right) + 1
        mark = {"tokens": 3, "sha256": hashlib.sha256((tmp_path / TOKENS_FILE).read_bytes()).hexdigest()}
        config.update({MARK: mark})
        refusal("expected 3 ascending token ids below 260", read_draft_vocabulary, str(tmp_path), None, config)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_head_of_codes_is_refused(tmp_path: Path, dialect: str, dtype: torch.dtype) -> None:
    facts = DIALECTS[dialect]
    weights = head_weights(facts)
    name = next(name for name in weights if weights[name].is_floating_point())
    weights[name] = weights[name].to(dtype)
    source = write_head(tmp_path / "head", facts, weights)
    refusal("stored as codes", lambda: open_head(source, TARGET).load(FLOAT))

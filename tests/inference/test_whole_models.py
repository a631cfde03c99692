"""Models that run as a whole, by their own forward: lossless as targets and as small LMs, cached right, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.small_lm import model as small_lm
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.open_target import load_tokenizer, open_target
from outrider.draft_models.targets.proof import prove_rows
from outrider.draft_models.targets.stack import LayerStack, RowCache, WholeModel
from outrider.draft_models.targets.target import Band
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.rounds import Round
from outrider.inference.core.target_session import WholeSession
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel
from outrider.inference.engines.cpu.recorded import can_pack
from outrider.inference.engines.packing import PackedLinear, pack_linears
from outrider.inference.loading.models import load_stack, make_runtime
from outrider.inference.loading.target_setup import find_setup
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from outrider.inference.shapes.factory import make_structure
from outrider.train.eagle3 import train_eagle3
from outrider.train.eesd import train_early_exit
from outrider.train.settings.drafters import Eagle3Config, EesdConfig
from outrider.train.settings.fit import FitConfig
from tests.inference.evaluate.evaluating import evaluate
from tests.known_targets import PROMPT, Target, targets, tokens_of
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.tiny import (
    STRUCTURES,
    VOCABULARY,
    byte_tokenizer,
    method_of,
    open_stack,
    random_prompt,
    reference_generate,
    save_target,
)

COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 256, "eos_token_id": None}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **COMMON)
RUN = {
    "gpt2": GPT2,
    "gpt_neox": transformers.GPTNeoXConfig(**SHAPE, **COMMON),
    "phi": transformers.PhiConfig(**SHAPE, **COMMON),
    "opt, norms behind": transformers.OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        do_layer_norm_before=False, max_position_embeddings=128, **COMMON,
    ),
}  # fmt: skip
REFUSED = {
    "recurrent": (
        transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, **COMMON),
        "do not keep every key",
    ),
    "sliding": (transformers.Starcoder2Config(**SHAPE, sliding_window=8, **COMMON), "do not keep every key"),
    "alibi": (transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, **COMMON), "does not take a 4-D mask"),
    "alibi, no positions": (transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, **COMMON), "by the given mask"),
    "bidirectional": (transformers.BertConfig(**SHAPE, **COMMON), "by the given mask"),
}


@pytest.fixture(autouse=True)
def _not_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """These could be run layer by layer, most of them: here they run as those do that cannot."""
    monkeypatch.setattr(small_lm, "why_not_by_layers", lambda config: "as if it could not be")


def save_plain(path: Path, config: transformers.PreTrainedConfig, scale: float = 5.0) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim == 2 else 1.0)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> WholeModel:
    lm = load_small_lm(str(path), load_tokenizer(str(path)), dtype=dtype)
    assert isinstance(lm, WholeModel)
    return lm


make = pytest.fixture(scope="module")(targets)


def decode(target: Target, lm: WholeModel, structure: str, prompt: list[int], count: int) -> tuple[list[int], Any]:
    """The new tokens, and the session of the small LM that drafted for them."""
    source, shape = SmallLMDraftModel(lm), make_structure(method_of(STRUCTURES[structure]), Streams(0))
    rounds = list(speculative(target.stack, ModelDrafter(source, shape), prompt, max_new_tokens=count))
    assert any(r.drafted for r in rounds)
    return tokens_of(rounds), source.session


def session_after(prompt: list[int], lm: WholeModel) -> WholeSession:
    """A session of its own that has read the prompt."""
    session = WholeSession(lm, 128)
    session.feed(torch.tensor(prompt), chain_parents(0, len(prompt)))
    session.commit(range(len(prompt)))
    return session


@pytest.mark.parametrize("structure", STRUCTURES)
def test_its_text_is_the_targets_and_its_cache_a_fresh_prefills(make: Callable[..., Target], structure: str) -> None:
    """Of a small LM that is often right."""
    target = make("llama")
    lm = target.small("small_lm")
    assert isinstance(lm, WholeModel)
    tokens, session = decode(target, lm, structure, PROMPT, 40)
    assert tokens == target.text_after(PROMPT, 40)
    fresh = session_after((PROMPT + tokens)[: session.base], lm)
    assert session.base > len(PROMPT) + 15
    for layer, expected in zip(session.cache.layers, fresh.cache.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, : session.base], expected.keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(layer.values[:, :, : session.base], expected.values, rtol=1e-9, atol=1e-9)


def test_16_bits(make: Callable[..., Target]) -> None:
    """The check is made in float32, what is loaded then is not."""
    target = make("llama")
    target.small("small_lm")  # saves it
    lm = load(target.folder / "small_lm", torch.bfloat16)
    assert {parameter.dtype for parameter in lm.parameters()} == {torch.bfloat16}
    tokens, session = decode(target, lm, "opt_tree", PROMPT, 40)
    assert tokens == target.text_after(PROMPT, 40)
    assert {layer.keys.dtype for layer in session.cache.layers} == {torch.bfloat16}


@pytest.mark.parametrize("name", RUN)
def test_other_architectures_run(make: Callable[..., Target], tmp_path: Path, name: str) -> None:
    target, lm = make("llama"), load(save_plain(tmp_path, RUN[name]))
    assert decode(target, lm, "k_config", PROMPT, 40)[0] == target.text_after(PROMPT, 40)
    if can_pack(torch.device("cpu"), torch.float32):
        before = session_after(PROMPT, lm).extend(torch.tensor([1, 2]), (-1, 0), 2)[1]
        pack_linears(lm)
        assert any(isinstance(module, PackedLinear) for module in lm.modules())
        after = session_after(PROMPT, lm).extend(torch.tensor([1, 2]), (-1, 0), 2)[1]
        torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RUN)
def test_rows_of_a_tree_equal_their_paths(tmp_path: Path, name: str) -> None:
    """Logits and hidden states of a tree fed in two parts, against the model's own forward over every path."""
    lm = load(save_plain(tmp_path, RUN[name]), torch.float64)
    prompt, tokens = random_prompt(7), random_prompt(6, seed=1)
    parents = (-1, 0, 0, 1, 2, 2)
    session = session_after(prompt, lm)
    halves = (slice(3), slice(3, None))
    parts = [session.extend(torch.tensor(tokens[half]), parents[half], 3) for half in halves]
    for row in range(6):
        path, node = [], row
        while node >= 0:
            path, node = [tokens[node], *path], parents[node]
        out = lm.model(input_ids=torch.tensor([prompt + path]), output_hidden_states=True)
        got_hidden, got_logits = (part[row % 3] for part in parts[row // 3])
        torch.testing.assert_close(got_logits, out.logits[0, -1], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got_hidden, out.hidden_states[-1][0, -1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_where_trees_cannot_run(tmp_path: Path, name: str) -> None:
    config, reason = REFUSED[name]
    refusal(rf"architecture '{config.model_type}' cannot draft trees: .*{reason}", load, save_plain(tmp_path, config))


@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask", "keep"])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_check_notices_what_a_forward_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: str, scale: float
) -> None:
    lm = WholeModel(transformers.AutoModelForCausalLM.from_pretrained(save_plain(tmp_path, GPT2, scale)))
    prove_rows(lm)
    forward = type(lm.model).forward

    def without(self: transformers.PreTrainedModel, **options: object) -> object:
        return forward(self, **{**options, ignored: None})

    if ignored == "keep":
        monkeypatch.setattr(RowCache, "keep", lambda *_: None)
    else:
        monkeypatch.setattr(type(lm.model), "forward", without)
    refusal(r"by the given mask|does not take", prove_rows, lm)


def test_a_text_longer_than_its_learned_positions_is_refused(make: Callable[..., Target], tmp_path: Path) -> None:
    target, lm, prompt = make("llama"), load(save_plain(tmp_path, GPT2)), random_prompt(120)
    assert len(decode(target, lm, "k_config", prompt, 8)[0]) == 8
    with pytest.raises(UserError, match=r"prompt \+ max_new_tokens = 129 positions, but the drafter .* only 128"):
        decode(target, lm, "k_config", prompt, 9)


# --- targets


CPU = torch.device("cpu")
OF_TARGET: dict[str, Any] = {**COMMON, "pad_token_id": None}
ROTARY = {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 256}
TARGETS: dict[str, transformers.PreTrainedConfig] = {
    "falcon": transformers.FalconConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, **OF_TARGET),
    "codegen": transformers.CodeGenConfig(**ROTARY, **OF_TARGET),
    "gptj": transformers.GPTJConfig(**ROTARY, **OF_TARGET),
}
LOOKUP = {"lookup": MethodConfig("prompt_lookup")}


# Their calls differ little: one family is tested here, all in the thorough tier.
@pytest.fixture(scope="module", params=typical_where(lambda name: name == "falcon", sorted(TARGETS)))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LayerStack]:
    path = save_plain(tmp_path_factory.mktemp(request.param), TARGETS[request.param])
    opened = open_target(str(path), by_layers=False)
    stack = load_stack(opened, None, torch.float32, CPU, by_layers=False)
    assert isinstance(stack, WholeModel)
    return path, stack


def of(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("runtime", ["eager", "graphed"])
def test_whatever_drafts_the_text_is_its_own(
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
        drafters.append(ModelDrafter(SmallLMDraftModel(small), made))
    assert [t for r in autoregressive(stack, prompt, **options) for t in r.tokens] == expected
    drafted = 0
    for drafter in drafters:
        rounds = list(speculative(stack, drafter, prompt, **options))
        assert [t for r in rounds for t in r.tokens] == expected
        drafted += sum(r.drafted for r in rounds)
    assert drafted > 60


def test_the_target_drafts_for_itself(target: tuple[Path, LayerStack], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a small LM, by its own forward: every draft is right, for any rows that a tree keeps. Rows off by one show."""
    (path, stack), prompt, keep = target, random_prompt(14), RowCache.keep
    expected = reference_generate(of(path), prompt, 21)

    def rounds(structure: str) -> list[Round]:
        made = make_structure(method_of(STRUCTURES[structure]), Streams(0))
        drafter = ModelDrafter(SmallLMDraftModel(WholeModel(of(path))), made)
        return list(speculative(stack, drafter, prompt, max_new_tokens=21))

    for found in (rounds("chain"), rounds("static")):
        assert tokens_of(found) == expected
        assert all(r.accepted == min(r.depth, len(r.tokens)) for r in found[1:])
    monkeypatch.setattr(RowCache, "keep", lambda self, base, rows: keep(self, base, [*rows[:1], *rows[:-1]]))
    assert tokens_of(rounds("static")) != expected


@pytest.mark.slow
def test_the_report(target: tuple[Path, LayerStack], tmp_path: Path, config: Callable[..., EvaluateConfig]) -> None:
    path, _ = target
    made = config(
        "out", target=str(path), checkpoint=None, small_lm=None, table=None, methods=LOOKUP, compare_transformers=True
    )
    evaluate(made)
    report = json.loads((Path(made.out_dir) / "report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0


@pytest.mark.parametrize("name", [*TARGETS, "mamba", "opt"])
def test_a_drafter_that_needs_layers_is_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    """There are no weights here. The error names the family."""
    others = {"mamba": transformers.MambaConfig(), "opt": transformers.OPTConfig(do_layer_norm_before=False)}
    (TARGETS | others)[name].save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    said, data = {"target": str(tmp_path), "out_dir": str(tmp_path / "out")}, DataConfig()
    commands: list[Callable[[], object]] = [
        lambda: train_early_exit(EesdConfig(data=data, fit=FitConfig(steps=1), **said)),
        lambda: train_eagle3(Eagle3Config(data=data, fit=FitConfig(steps=1), **said)),
        lambda: find_setup(EvaluateConfig(methods={"m": MethodConfig("skip_layers")}, **said)),
        lambda: find_setup(EvaluateConfig(methods={"m": MethodConfig("eagle3")}, eagle3="head", **said)),
    ]
    for command in commands:
        refusal(f"architecture '{name}' cannot be run layer by layer", command)


def test_a_target_that_proves_neither_is_refused(tmp_path: Path) -> None:
    path = save_plain(tmp_path, transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, **OF_TARGET))
    with pytest.raises(UserError, match=r"neither by layers nor by its own forward \(its forward does not take a 4-D"):
        load_stack(open_target(str(path), by_layers=False), None, torch.float32, CPU, by_layers=False)


def test_a_window_that_is_applied_unasked_is_refused(tmp_path: Path) -> None:
    """GPT-Neo's local layers apply their window to any mask, and by rows, not by positions."""
    kinds = [[["global", "local"], 1]]
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128}
    for window, refused in ((20, True), (128, False)):
        config = transformers.GPTNeoConfig(**shape, attention_types=kinds, window_size=window, **OF_TARGET)
        target = open_target(str(save_plain(tmp_path / str(window), config)), by_layers=False)
        if refused:
            with pytest.raises(UserError, match=r"neither by layers nor .* a branch of a tree|token \d+ of a text of"):
                load_stack(target, None, torch.float32, CPU, by_layers=False)
        else:
            assert load_stack(target, None, torch.float32, CPU, by_layers=False)

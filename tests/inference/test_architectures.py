"""Small LMs of architectures that are run by their own forward: lossless, cached right, or refused when loaded."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    MambaConfig,
    MptConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Starcoder2Config,
)

from data_prep.text.prompts import Prompt
from draft_models.small_lm import model as small_lm
from draft_models.small_lm.model import load_small_lm
from draft_models.targets.open_target import load_tokenizer
from draft_models.targets.proof import prove_rows
from draft_models.targets.stack import LayerStack, RowCache, WholeModel
from inference.core.decode import speculative
from inference.core.target_session import WholeSession
from inference.core.tree import chain_parents
from inference.drafters.shaped import ModelDrafter
from inference.drafters.small_lm import SmallLMSource
from inference.engines.packing import PackedLinear, can_pack, pack_linears
from inference.evaluate import compare
from inference.measure import bench
from inference.settings.evaluate import EvaluateConfig
from inference.settings.method import MethodConfig
from inference.shapes.factory import make_structure
from outrider.errors import UserError
from outrider.streams import Streams
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

COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 256, "eos_token_id": None}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **COMMON)
RUN = {
    "gpt2": GPT2,
    "gpt_neox": GPTNeoXConfig(**SHAPE, **COMMON),
    "phi": PhiConfig(**SHAPE, **COMMON),
    "opt, norms behind": OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        do_layer_norm_before=False, max_position_embeddings=128, **COMMON,
    ),
}  # fmt: skip
REFUSED = {
    "recurrent": (MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, **COMMON), "do not keep every key"),
    "sliding": (Starcoder2Config(**SHAPE, sliding_window=8, **COMMON), "do not keep every key"),
    "alibi": (BloomConfig(hidden_size=64, n_layer=2, n_head=4, **COMMON), "does not take a 4-D mask"),
    "alibi, no positions": (MptConfig(d_model=64, n_heads=4, n_layers=2, **COMMON), "by the given mask"),
    "bidirectional": (BertConfig(**SHAPE, **COMMON), "by the given mask"),
}


@pytest.fixture(autouse=True)
def _not_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """These could be run layer by layer, most of them: here they run as those do that cannot."""
    monkeypatch.setattr(small_lm, "why_not_by_layers", lambda config: "as if it could not be")


def save_plain(path: Path, config: PreTrainedConfig, scale: float = 5.0) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
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


def decode(stack: LayerStack, source: SmallLMSource, structure: str, prompt: list[int], count: int) -> tuple:
    """The new tokens, and how many were drafted and accepted."""
    drafting = make_structure(method_of(STRUCTURES[structure]), Streams(0))
    rounds = list(speculative(stack, ModelDrafter(source, drafting), prompt, max_new_tokens=count))
    return [t for r in rounds for t in r.tokens], sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)


def knowing(target: LayerStack, text: list[int], path: Path) -> Path:
    """A GPT-2 in `path` trained on the one `text`, so that it guesses much of it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2).train()
    optimizer, ids = torch.optim.Adam(model.parameters(), lr=3e-3), torch.tensor([text])
    for _ in range(25):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayerStack, Path, list[int], list[int]]:
    """A target, a GPT-2 that guesses well, a prompt and the target's own continuation."""
    folder = tmp_path_factory.mktemp("trained")
    model, stack = open_stack(save_target(folder / "target", kv_heads=2), torch.float64)
    prompt = random_prompt(20)
    expected = reference_generate(model, prompt, 40)
    return stack, knowing(stack, prompt + expected, folder / "small"), prompt, expected


def session_after(prompt: list[int], lm: WholeModel) -> WholeSession:
    """A session of its own that has read the prompt."""
    session = WholeSession(lm, 128)
    session.feed(torch.tensor(prompt), chain_parents(0, len(prompt)))
    session.commit(range(len(prompt)))
    return session


@pytest.mark.parametrize("structure", STRUCTURES)
def test_greedy_equals_generate(trained: tuple, structure: str) -> None:
    stack, path, prompt, expected = trained
    tokens, drafted, accepted = decode(stack, SmallLMSource(load(path)), structure, prompt, 40)
    assert tokens == expected
    assert drafted >= accepted > 20


@pytest.mark.parametrize("name", RUN)
def test_other_architectures_run(trained: tuple, tmp_path: Path, name: str) -> None:
    stack, _, prompt, expected = trained
    lm = load(save_plain(tmp_path, RUN[name]))
    assert decode(stack, SmallLMSource(lm), "k_config", prompt, 40)[0] == expected
    if can_pack(torch.device("cpu"), torch.float32):
        before = session_after(prompt, lm).extend(torch.tensor([1, 2]), (-1, 0), 2)[1]
        pack_linears(lm)
        assert any(isinstance(module, PackedLinear) for module in lm.modules())
        after = session_after(prompt, lm).extend(torch.tensor([1, 2]), (-1, 0), 2)[1]
        torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_its_cache_equals_a_fresh_prefill(trained: tuple, structure: str) -> None:
    stack, path, prompt, _ = trained
    lm = load(path, torch.float64)
    source = SmallLMSource(lm)
    text = prompt + decode(stack, source, structure, prompt, 30)[0]
    session = source.session
    assert isinstance(session, WholeSession)
    fresh = session_after(text[: session.base], lm)
    assert session.base > len(prompt) + 15
    for layer, expected in zip(session.cache.layers, fresh.cache.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, : session.base], expected.keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(layer.values[:, :, : session.base], expected.values, rtol=1e-9, atol=1e-9)


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
    with pytest.raises(UserError, match=rf"architecture '{config.model_type}' cannot draft trees: .*{reason}"):
        load(save_plain(tmp_path, config))


@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask", "keep"])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_check_notices_what_a_forward_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: str, scale: float
) -> None:
    lm = WholeModel(AutoModelForCausalLM.from_pretrained(save_plain(tmp_path, GPT2, scale)))
    prove_rows(lm)
    forward = type(lm.model).forward

    def without(self: PreTrainedModel, **options: object) -> object:
        return forward(self, **{**options, ignored: None})

    if ignored == "keep":
        monkeypatch.setattr(RowCache, "keep", lambda *_: None)
    else:
        monkeypatch.setattr(type(lm.model), "forward", without)
    with pytest.raises(UserError, match=r"by the given mask|does not take"):
        prove_rows(lm)


def test_a_text_longer_than_its_learned_positions_is_refused(trained: tuple, tmp_path: Path) -> None:
    stack, path, _, _ = trained
    prompt = random_prompt(120)
    assert len(decode(stack, SmallLMSource(load(path)), "k_config", prompt, 8)[0]) == 8
    with pytest.raises(UserError, match=r"prompt \+ max_new_tokens = 129 positions, but the drafter .* only 128"):
        decode(stack, SmallLMSource(load(path)), "k_config", prompt, 9)


def test_prompts_are_checked_against_both_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is decoded: 29 tokens and 100 new ones fit the target's 256 positions, not the drafter's 128."""
    target, small = save_target(tmp_path / "target"), save_plain(tmp_path / "small", GPT2)
    config = EvaluateConfig(
        target=str(target), small_lm=str(small), methods={"m": MethodConfig(source="small_lm")}, max_new_tokens=100,
        out_dir=str(tmp_path / "out"),
    )  # fmt: skip
    monkeypatch.setattr(bench, "render_prompt", lambda *_, **__: random_prompt(29))
    with pytest.raises(UserError, match="29 tokens, expected 1 to 28"):
        compare.evaluate_checkpoint(config, [Prompt("p", "c", ("text",), False)])


def test_16_bits(trained: tuple) -> None:
    """The check is made in float32, what is loaded then is not."""
    stack, path, prompt, expected = trained
    lm = load(path, torch.bfloat16)
    assert {parameter.dtype for parameter in lm.parameters()} == {torch.bfloat16}
    tokens, _, accepted = decode(stack, SmallLMSource(lm), "opt_tree", prompt, 40)
    assert tokens == expected
    assert accepted > 20

"""Attention against the textbook, its masks, also those of long texts made a block at a time, and aux hidden states."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from outrider.data_prep.text.rows import _positions
from outrider.draft_models.targets.attention import KERNELS, grouped_attention, packed_band, stock_attention, use_kernel
from outrider.draft_models.targets.model_files import layer_stack, load_layers
from outrider.draft_models.targets.open_target import load_config, open_target
from outrider.draft_models.targets.stack import LayerStack, WholeModel
from outrider.draft_models.targets.target import Band
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.core.target_session import TargetSession, WholeSession
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.train.toy_target import packed_mask
from tests.families import save_family
from tests.memory import Largest
from tests.tiny import LAYERS, VOCABULARY, make_drafter, open_stack, random_prompt, save_target
from tests.train.jobs import exit_student


def textbook(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 9), (1, 4, 9), (1, 7, 7), (3, 5, 5)])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_equals_the_textbook(key_heads: int, batch: int, queries: int, keys: int, additive: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 4, queries, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, batch, key_heads, keys, 8, generator=generator, dtype=torch.float64)
    visible = torch.rand(batch, 1, queries, keys, generator=generator) < 0.6
    visible[..., 0] = True
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf) if additive else visible
    out, _ = grouped_attention(nn.Module(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(out, textbook(query, key, value, visible, 0.3))
    if queries == keys:
        causal = torch.ones(queries, keys, dtype=torch.bool).tril()
        out, _ = grouped_attention(nn.Module(), query, key, value, None, scaling=0.3)
        torch.testing.assert_close(out, textbook(query, key, value, causal, 0.3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "masked"),
    [(1, 300, 64, False), (1, 300, 64, True), (7, 65, 16, True), (26, 128, 32, True)],
)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_no_kernel_rounds_more_than_another(
    key_heads: int, queries: int, keys: int, width: int, masked: bool, dtype: torch.dtype
) -> None:
    """Scores up to ±100, as in trained models: a score that went through 16 bits would be off by up to 0.25."""
    torch.manual_seed(queries)
    query = (12 * torch.randn(1, 4, queries, width)).to(dtype)
    key, value = torch.randn(2, 1, key_heads, keys, width).to(dtype)
    visible = torch.rand(1, 1, queries, keys) < 0.6
    visible[..., 0] = True
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min) if masked else None
    seen = visible if masked else torch.ones_like(visible)
    exact = textbook(query.double(), key.double(), value.double(), seen, width**-0.5)
    errors = {}
    for kernel in KERNELS:
        with use_kernel(kernel):
            out, _ = grouped_attention(nn.Module(), query, key, value, mask)
        assert out.dtype == dtype
        errors[kernel] = float((out.double() - exact).square().mean().sqrt())
    # A fused kernel rounds weights before it divides by their sum, and so the largest not at all.
    assert errors["products"] <= 2 * errors["fused"] + torch.finfo(dtype).eps ** 2


def test_no_mask_over_a_filled_cache_is_refused() -> None:
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match="3 queries, 5 keys"):
        grouped_attention(nn.Module(), query, key, key, None)


def test_packed_mask() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1, -1]])
    mask = packed_mask(documents)[0, 0]
    for i in range(7):
        for j in range(7):
            assert mask[i, j] == (j <= i and documents[0, i] == documents[0, j])


LONG = 1400  # tokens


def documents(rows: int, length: int, most: int, seed: int = 0) -> Tensor:
    """Packed rows [rows, length] of documents of up to `most` tokens; the first row ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.arange(length)[None].repeat(rows, 1)
    sizes = torch.randint(1, most + 1, (rows, length), generator=generator)
    packed = torch.stack([row.repeat_interleave(size)[:length] for row, size in zip(numbers, sizes, strict=True)])
    packed[0, -length // 9 :] = -1
    return packed


def batch(rows: int, length: int, most: int) -> dict[str, Tensor]:
    """A batch for students."""
    packed = documents(rows, length, most)
    ids = torch.tensor([random_prompt(length, seed) for seed in range(rows)])
    positions = torch.stack([torch.from_numpy(_positions(row.numpy())) for row in packed])
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "positions": positions, "documents": packed}


def in_blocks(patch: pytest.MonkeyPatch, size: int) -> None:
    """Masks are made this many queries at a time."""
    patch.setattr(Band, "BLOCK", size)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40, 200])
@pytest.mark.parametrize(("rows", "heads", "key_heads", "length"), [(2, 4, 2, 100), (1, 6, 1, 33), (3, 2, 2, 48)])
def test_a_band_is_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, key_heads: int, length: int, window: int | None
) -> None:
    in_blocks(monkeypatch, 16)
    torch.manual_seed(0)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    for most in (1, 9, 60, 1000):
        packed = documents(rows, length, most)
        dense = packed_mask(packed) & (distance < (window or length))
        given = [torch.randn(rows, n, length, 8, dtype=torch.float64, requires_grad=True)
                 for n in (heads, key_heads, key_heads)]  # fmt: skip
        results = []
        by_document = packed_band(packed, window)
        alike = Band.cut([0, length], by_document.first_keys.amin(0).tolist())  # the blocks of a GPU
        for mask in (dense, by_document, replace(by_document, blocks=(alike,))):
            out, _ = grouped_attention(nn.Module(), *given, mask, scaling=0.4)
            results.append((out, *torch.autograd.grad(out.sin().sum(), given)))
        for expected, *found in zip(*results, strict=True):
            for one in found:
                torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)
    if window is not None:
        everything = torch.zeros(1, length, dtype=torch.long)
        sliding, alike = Band.sliding(torch.arange(length), window), packed_band(everything, window)
        assert torch.equal(sliding.first_keys, alike.first_keys)
        assert sliding.blocks == alike.blocks


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "opt"])
def test_students_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Loss and gradients of an early exit, through transformers' own layers, with and without checkpoints."""
    path = save_target(tmp_path, architecture, kv_heads=2, dropout=0.0)
    config, given, results = load_config(str(path)), batch(2, 90, 50), []
    for block, checkpointed in ((1000, False), (16, False), (16, True)):
        in_blocks(monkeypatch, block)
        model = load_layers(open_tensors(str(path)), config, range(LAYERS), dtype=torch.float32)
        student = exit_student(model, 2, objective="forward_kl").train()
        if checkpointed:
            student.gradient_checkpointing_enable()
        loss = student(**given)["loss_sum"]
        loss.backward()
        gradients = [p.grad for p in student.parameters() if p.grad is not None]
        results.append((loss, *gradients))
    for others in results[1:]:
        for found, expected in zip(others, results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def prefill(stack: LayerStack, prompt: list[int], split: int) -> tuple[TargetSession, Tensor]:
    session = TargetSession(stack, split, len(prompt) + 1)
    session.feed(torch.tensor(prompt), chain_parents(0, len(prompt)))
    return session, session.finish(last_only=True)


@pytest.mark.parametrize("architecture", ["mistral", "qwen2"])
def test_a_long_prompt_of_a_windowed_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Logits, and what the exit layer makes of the prompt."""
    path = save_target(tmp_path, architecture, kv_heads=2)
    _, stack = open_stack(path, torch.float64)
    drafter, found = make_drafter(path, 1, dtype=torch.float64), []
    for block in (1000, 16):
        in_blocks(monkeypatch, block)
        session, logits = prefill(stack, random_prompt(70), 1)
        with torch.inference_mode():
            source = EarlyExitDraftModel(drafter)
            source.begin(session)
            source.cache.keep(0, ())  # once more, for what it says of every row
            found.append((logits, source._exit(session.hidden, 0, 70)[1]))
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_windowed_prefill_makes_nothing_square(tmp_path: Path) -> None:
    path = save_target(tmp_path, "mistral", kv_heads=1, max_position_embeddings=2 * LONG)
    _, stack = open_stack(path)
    with Largest() as largest:
        prefill(stack, random_prompt(LONG), 2)
    assert largest.bytes < LONG * LONG  # a mask of the whole prompt has 4 bytes, for each of 4 heads in a group


def test_packed_training_makes_nothing_square(tmp_path: Path) -> None:
    path = save_target(tmp_path, "qwen2", kv_heads=1, max_position_embeddings=2 * LONG)
    config = load_config(str(path))
    model = load_layers(open_tensors(str(path)), config, range(LAYERS), dtype=torch.float32)
    student = exit_student(model, 2, objective="forward_kl")
    given = batch(1, LONG, 60)
    with Largest() as largest:
        student(**given)["loss_sum"].backward()
    # The mask of a block: 4 heads in a group, 512 queries, their keys and a document's more, in float32.
    assert largest.bytes <= 4 * 512 * (512 + 60) * 4
    assert largest.bytes < LONG * LONG * 4


def test_the_prompt_of_another_architecture_makes_nothing_square() -> None:
    """A model that is run by its own forward takes dense masks only: it is fed a long prompt in parts."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=2 * LONG, vocab_size=VOCABULARY)
    lm = WholeModel(AutoModelForCausalLM.from_config(config))
    prompt = torch.tensor(random_prompt(LONG))
    with torch.inference_mode():
        with Largest() as largest:
            session = WholeSession(lm, LONG + 8)
            session.feed(prompt, chain_parents(0, LONG))
            session.commit(range(LONG))
        assert largest.bytes < 2 * LONG * LONG  # half of the mask
        _, logits = session.extend(prompt[:3], (-1, 0, 1), 3)
        expected = lm.model(torch.cat([prompt, prompt[:3]])[None]).logits[0, -3:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert session.cache.get_seq_length() == LONG + 3


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "nanochat", "opt", "qwen3"])
def test_an_aux_hidden_state_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    """At every boundary, in one run or in two halves; transformers returns the last one after the final norm."""
    model = open_target(str(save_family(tmp_path, family))).layers(dtype=torch.float32)
    stack, ids = layer_stack(model), torch.tensor([random_prompt(14)])
    positions = torch.arange(14)[None]
    stack.reserve(14)
    rotary, masks = stack.rotary(positions), stack.packed_masks(torch.zeros_like(ids))
    with torch.inference_mode():
        with stock_attention(model):
            *expected, last = model(ids, output_hidden_states=True).hidden_states
        embedded = stack.embed(ids, positions)
        out, taps = stack.run_with_aux(embedded, 0, LAYERS, rotary, masks, range(LAYERS + 1))
        middle, low = stack.run_with_aux(embedded, 0, 2, rotary, masks, [1])
        high_out, high = stack.run_with_aux(middle, 2, LAYERS, rotary, masks, [2, 3])
        for tap, hidden in zip([*taps, *low, *high], [*expected, out, *expected[1:4]], strict=True):
            torch.testing.assert_close(tap, hidden, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(stack.norm(taps[-1]), last, rtol=1e-5, atol=1e-4)
        assert torch.equal(out, stack.run(embedded, 0, LAYERS, rotary, masks))
        assert torch.equal(high_out, out)

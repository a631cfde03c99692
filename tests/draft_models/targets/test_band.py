"""Masks of long texts and packed rows, made a block at a time: a dense mask's values and gradients, little memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from data_prep.text.rows import _positions
from draft_models.early_exit.model import EarlyExitStudent
from draft_models.targets.architectures import load_config
from draft_models.targets.attention import grouped_attention, packed_mask
from draft_models.targets.model_files import load_layers
from draft_models.targets.stack import LayerStack, WholeModel
from draft_models.targets.target import Band
from draft_models.targets.tensor_files import open_tensors
from inference.core.target_session import TargetSession, WholeSession
from inference.core.tree import chain_parents
from inference.drafters.early_exit import EarlyExitSource
from tests.memory import Largest
from tests.tiny import LAYERS, VOCABULARY, make_drafter, open_stack, random_prompt, save_target

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


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40, 200])
@pytest.mark.parametrize(("rows", "heads", "key_heads", "length"), [(2, 4, 2, 100), (1, 6, 1, 33), (3, 2, 2, 48)])
def test_a_band_is_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, key_heads: int, length: int, window: int | None
) -> None:
    monkeypatch.setattr(Band, "BLOCK", 16)
    torch.manual_seed(0)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    for most in (1, 9, 60, 1000):
        packed = documents(rows, length, most)
        dense = packed_mask(packed) & (distance < (window or length))
        given = [torch.randn(rows, n, length, 8, dtype=torch.float64, requires_grad=True)
                 for n in (heads, key_heads, key_heads)]  # fmt: skip
        results = []
        for mask in (dense, Band.packed(packed, window)):
            out, _ = grouped_attention(nn.Module(), *given, mask, scaling=0.4)
            results.append((out, *torch.autograd.grad(out.sin().sum(), given)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if window is not None:
        everything = torch.zeros(1, length, dtype=torch.long)
        sliding, alike = Band.sliding(torch.arange(length), window), Band.packed(everything, window)
        assert torch.equal(sliding.first, alike.first)
        assert sliding.starts == alike.starts


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "opt"])
def test_students_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Loss and gradients of an early exit, through transformers' own layers, with and without checkpoints."""
    path = save_target(tmp_path, architecture, kv_heads=2, dropout=0.0)
    config, given, results = load_config(str(path)), batch(2, 90, 50), []
    for block, checkpointed in ((1000, False), (16, False), (16, True)):
        monkeypatch.setattr(Band, "BLOCK", block)
        model = load_layers(open_tensors(str(path)), config, range(LAYERS), dtype=torch.float32)
        student = EarlyExitStudent(model, 2, train_head=True, objective="forward_kl").train()
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
        monkeypatch.setattr(Band, "BLOCK", block)
        session, logits = prefill(stack, random_prompt(70), 1)
        with torch.inference_mode():
            source = EarlyExitSource(drafter)
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
    student = EarlyExitStudent(model, 2, train_head=True, objective="forward_kl")
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

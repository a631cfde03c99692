"""A drafter over some tokens of the vocabulary: chosen by frequency, stored, decoded with, and still lossless."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from outrider.draft_models.draft_vocabulary import choose_tokens, count_tokens, coverage, draft_indices, fit_rows
from outrider.draft_models.early_exit.checkpoint import WEIGHTS_FILE, save_pretrained
from outrider.draft_models.early_exit.model import exit_layers
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.narrowed import spread_logits
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.drafters.early_exit.drafter import EarlyExitPlugin
from outrider.inference.engines.cpu.recorded import can_pack
from outrider.inference.engines.packing import PackedLinear
from outrider.inference.loading.memory_plan import Storage, weight_bytes
from outrider.inference.loading.models import prepare_models
from tests.tiny import LAYERS, VOCABULARY, open_stack, random_prompt, save_target
from tests.train.jobs import exit_student

TOKENS = torch.tensor([3, 7, 100, 101, 256])


def test_the_most_frequent_are_chosen_and_what_must_be_in_is() -> None:
    labels = torch.tensor([5, 5, 5, 9, 9, 2, 7, IGNORE])
    counts = count_tokens([{"labels": labels}, {"labels": torch.tensor([9, 9, IGNORE])}], 12)
    assert counts.tolist() == [0, 0, 1, 0, 0, 3, 0, 1, 0, 4, 0, 0]
    assert choose_tokens(counts, 2).tolist() == [5, 9]
    assert choose_tokens(counts, 3).tolist() == [2, 5, 9]  # of equally frequent ones the lower
    assert choose_tokens(counts, 3, required_ids=[11]).tolist() == [5, 9, 11]
    assert choose_tokens(counts, 12).tolist() == list(range(12))
    assert coverage(counts, torch.tensor([5, 9])) == pytest.approx(7 / 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_tokens_have_no_probability_at_any_temperature(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 5).to(dtype)
    whole = spread_logits(logits, TOKENS, VOCABULARY)
    assert whole.shape == (2, 3, VOCABULARY)
    assert whole.isfinite().all()
    assert torch.equal(whole[..., TOKENS], logits)
    for temperature in (0.1, 1.0, 2.0):
        distribution = (whole.float() / temperature).softmax(-1)
        assert distribution[..., TOKENS].sum(-1).allclose(torch.ones(2, 3))
        assert (distribution > 0).sum() <= 2 * 3 * 5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [200, VOCABULARY, 400])
def test_rows_are_cut_or_padded_and_padding_is_never_likeliest(rows: int, tied: bool, tmp_path: Path) -> None:
    whole, _ = open_stack(save_target(tmp_path, tied=tied))
    fitted, ids = copy.deepcopy(whole), torch.tensor([random_prompt(20)]).clamp(max=199)
    fit_rows(fitted, rows, {"pad_token_id": None})
    shared = min(rows, VOCABULARY)
    before, after = whole(ids).logits, fitted(ids).logits
    assert after.shape[-1] == rows == fitted.config.vocab_size
    assert torch.equal(before[..., :shared], after[..., :shared])
    assert int(after.argmax(-1).max()) < shared
    fitted.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(ids).logits, after)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_labels_by_their_place() -> None:
    labels = torch.tensor([[100, 4, 256, IGNORE, 0]])
    assert draft_indices(labels, torch.tensor([0, 4, 100]), VOCABULARY).tolist() == [[2, 1, IGNORE, IGNORE, 0]]


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([random_prompt(24, seed=3)])
    zeros = torch.zeros(1, 24, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.roll(-1, 1), "positions": torch.arange(24)[None], "documents": zeros}


def test_without_a_head_of_its_own_it_shares_rows_of_the_targets(tmp_path: Path) -> None:
    """Frozen as they are, stored nowhere, and packed for decoding from a target that is packed itself."""
    path = save_target(tmp_path / "target", kv_heads=2)
    target = open_target(str(path))
    layers = exit_layers(target.config, LAYERS - 1)
    student = exit_student(target.layers(layers, dtype=torch.float32), LAYERS - 1, TOKENS, train_head=False)
    student(**batch())["loss_sum"].backward()
    assert not student.drafter.output_head.weight.requires_grad
    trained, frozen = ([p.numel() for p in student.parameters() if p.requires_grad == wanted] for wanted in (1, 0))
    assert sum(trained) == sum(p.numel() for p in student.drafter.parameters())
    width = target.config.hidden_size
    first = sum(p.numel() for p in target.layers([0, 1, 2], dtype=torch.float32).model.layers.parameters())
    assert sum(frozen) == first + (VOCABULARY + len(TOKENS)) * width  # the embedding, and these rows of the head
    student.drafter.requires_grad_(False)
    save_pretrained(tmp_path / "drafter", student.drafter, target.fingerprint, {}, torch.float32)
    stored = load_file(tmp_path / "drafter" / WEIGHTS_FILE)
    assert not any(name.startswith("head") for name in stored)
    planned = weight_bytes(EarlyExitPlugin().empty_model(str(tmp_path / "drafter"), target.config), Storage(4, 64))
    assert planned == 4 * (sum(trained) + len(TOKENS) * width)
    placed: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    made = EarlyExitPlugin().load(str(tmp_path / "drafter"), target, {}, **placed)
    stack = target.stack(**placed)
    hidden = torch.randn(1, 4, width)
    expected = stack.head(made.norm(hidden))[..., TOKENS]
    prepare_models(stack, {"early_exit": made})
    assert (type(made.output_head) is PackedLinear) == can_pack(stack.device, torch.float32)
    torch.testing.assert_close(made.logits(hidden)[..., TOKENS], expected)


def test_the_rest_of_the_head_costs_a_step_nothing(tmp_path: Path) -> None:
    """From cached distributions: a step differs by the rows that are left out, forward and by its hidden states."""
    target = open_target(str(save_target(tmp_path / "target")))
    cached = {"top_ids": torch.tensor([3, 4, 100]).expand(1, 24, 3), "top_logprobs": torch.full((1, 24, 3), -1.5)}
    cached["tail"] = torch.full((1, 24), 0.3)

    def work(tokens: torch.Tensor | None) -> int:
        model = target.layers(exit_layers(target.config, 2), dtype=torch.float32)
        student = exit_student(model, 2, tokens, train_head=False, objective="kl_tv", teacher="cached")
        with FlopCounterMode(display=False) as counted:
            student(**batch(), **cached)["loss_sum"].backward()
        return counted.get_total_flops()

    rows = target.config.vocab_size - len(TOKENS)
    assert work(None) - work(TOKENS) == 4 * 24 * rows * target.config.hidden_size

"""The small LM in training: its loss on its own samples, against whole forwards written out."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from outrider.draft_models.draft_vocabulary import narrow
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.model_files import layer_stack, load_layers
from outrider.draft_models.targets.narrowed import DraftVocabulary
from outrider.draft_models.targets.open_target import load_config
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.train.finetune_drafter import SmallLMStudent
from outrider.train.parts.on_policy import OnPolicy, choose_prefix, continue_prefixes, label_samples, row_generator
from outrider.train.parts.parallel import ONE_A_PASS, Parallel
from tests.refusals import refusal
from tests.tiny import VOCABULARY, open_stack, random_prompt


def student(
    target: Path, objective: str = "forward_kl", on_policy: OnPolicy | None = None, parallel: Parallel = ONE_A_PASS,
    tokens: Tensor | None = None,
) -> SmallLMStudent:  # fmt: skip
    """An untrained drafter beside its teacher, both of the target's own layers: two of them and all four. tokens: of
    the drafter's vocabulary."""
    settings, files = load_config(str(target)), open_tensors(str(target))
    lm = load_layers(files, settings, [0, 3], dtype=torch.float32).requires_grad_(True)
    if tokens is not None:
        narrow(lm, DraftVocabulary(tokens, VOCABULARY))
    teacher = layer_stack(load_layers(files, settings, range(4), dtype=torch.float32))
    return SmallLMStudent(lm, objective, teacher, on_policy, parallel)


def batch(rows: int = 3, length: int = 20) -> dict[str, Tensor]:
    """Rows of two documents, the first supervised from its middle on."""
    ids = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))
    half = length // 2
    documents = (torch.arange(length) >= half).long().expand(rows, length)
    labels = ids.roll(-1, 1)
    labels[:, half - 1] = labels[:, -1] = IGNORE
    labels[:, : half // 2] = IGNORE
    positions = (torch.arange(length) % half).expand(rows, length)
    return {"input_ids": ids, "labels": labels, "positions": positions, "documents": documents}


def test_gradients_reach_the_drafter_and_not_the_teacher(target: Path) -> None:
    one = student(target, "jensen_shannon", OnPolicy(1.0, 6, 0, frozenset()))
    one.train()
    with torch.autocast("cpu", torch.bfloat16):
        one(**batch())["loss_sum"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in one.parameters())
    assert one.teacher is not None
    assert all(p.grad is None for p in one.teacher.parameters())
    assert not [name for name, _ in one.named_parameters() if not name.startswith("lm.")]


def test_a_step_is_on_policy_as_often_as_asked() -> None:
    share = OnPolicy(0.3, 8, 0, frozenset())
    due = [share.is_due(step) for step in range(2000)]
    assert 0.25 < sum(due) / 2000 < 0.35
    assert due == [share.is_due(step) for step in range(2000)]
    assert due != [OnPolicy(0.3, 8, 1, frozenset()).is_due(step) for step in range(2000)]
    assert all(OnPolicy(1.0, 8, 0, frozenset()).is_due(step) for step in range(50))
    seeds = [row_generator(0, step, row).random() for step in (1, 2) for row in batch()["input_ids"]]
    assert len(set(seeds)) == len(seeds) == 6  # no two rows and no two steps draw the same numbers


def on_own_samples(lm: Any, whole: Any, rows: dict[str, Tensor]) -> Tensor:
    """The reverse KL of step 3 with seed 5 on 6 tokens a row, by whole forwards."""
    expected = torch.zeros(())
    for ids, labels, positions in zip(rows["input_ids"], rows["labels"], rows["positions"], strict=True):
        generator = row_generator(5, 3, ids)
        prefix = choose_prefix(ids, labels, positions, 6, generator)
        text, _ = continue_prefixes(lm, [prefix], torch.from_numpy(generator.random((1, 6))), VOCABULARY)
        places = slice(len(prefix) - 1, len(prefix) + 5)
        with torch.no_grad():
            p, q = (model(text).logits[0, places].log_softmax(-1) for model in (whole, lm))
        expected = expected + (q.exp() * (q - p)).sum(-1).mean() * (labels != IGNORE).sum()
    return expected


def test_on_policy_is_the_divergence_on_own_samples(target: Path) -> None:
    """Written out row by row with whole forwards: sample, score, mean, weight by the row's supervised tokens."""
    one, rows = student(target, "reverse_kl", OnPolicy(1.0, 6, 5, frozenset())), batch()
    rows["labels"][1] = IGNORE  # a row may have nothing to learn
    one.begin_step(3)
    got = one.train()(**rows)["loss_sum"]
    torch.testing.assert_close(got, on_own_samples(one.lm, open_stack(target)[0], rows), rtol=1e-4, atol=1e-4)
    assert got.requires_grad

    with torch.no_grad():
        one.begin_step(4)
        assert (one(**rows)["loss_sum"] - got).abs() > 1e-3  # other prefixes, other samples
        one.begin_step(3)
        assert (one(**rows)["loss_sum"] - got).abs() < 1e-4
        assert (one.eval()(**rows)["loss_sum"] - got).abs() > 1e-3  # evaluation is on the text
    one.gradient_checkpointing_enable()  # which transformers' models in training pay for with their cache
    torch.testing.assert_close(one.train()(**rows)["loss_sum"], got)
    assert one.lm.training


def test_own_samples_are_tokens_the_teacher_knows(target: Path) -> None:
    given = student(target)
    given.lm.resize_token_embeddings(4 * VOCABULARY, mean_resizing=False)  # padded
    with torch.no_grad():
        given.lm.lm_head.weight.copy_(given.lm.lm_head.weight[:VOCABULARY].repeat(4, 1))
    one = SmallLMStudent(given.lm, "forward_kl", given.teacher, OnPolicy(1.0, 6, 0, frozenset())).train()
    assert one(**batch())["loss_sum"].isfinite()


def test_the_teacher_does_not_follow_the_loops_precision(target: Path) -> None:
    one, rows = student(target), batch()
    taught = one.teach(rows["input_ids"], rows["positions"], rows["documents"])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(one.teach(rows["input_ids"], rows["positions"], rows["documents"]), taught)


def test_adapters_are_merged_before_rounding(target: Path) -> None:
    lm = get_peft_model(student(target).lm, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    one = SmallLMStudent(lm, "cross_entropy")
    exact, rounded = one.merge_adapters(torch.float32).state_dict(), one.merge_adapters(torch.bfloat16).state_dict()
    assert all(torch.equal(rounded[name], value.bfloat16()) for name, value in exact.items())
    ids = batch()["input_ids"]
    torch.testing.assert_close(
        one.merge_adapters(torch.float32)(ids).logits, lm.eval()(ids).logits, rtol=1e-4, atol=1e-4
    )


def test_on_policy_needs_whole_parameters(target: Path) -> None:
    sampling, plain = student(target, on_policy=OnPolicy(0.5, 6, 0, frozenset())), student(target)
    sampling.begin_step(1)
    for one in (sampling, plain):
        next(one.parameters()).ds_id = 0  # the mark of ZeRO-3
    refusal("on_policy: needs whole parameters; use ddp or zero2, or on_policy=0", sampling.begin_step, 2)
    plain.begin_step(2)


def test_a_continuation_is_drawn_from_the_drafter(target: Path) -> None:
    """Each token is where the cumulative probability after its own text passes the number, whatever is beside it."""
    lm = student(target).lm
    prefixes = [torch.tensor(random_prompt(length, length)) for length in (3, 9, 5)]
    numbers = torch.rand(3, 5, generator=torch.Generator().manual_seed(2))
    ids, sampled = continue_prefixes(lm, prefixes, numbers, VOCABULARY)
    for prefix, row, tokens, uniform in zip(prefixes, ids, sampled, numbers, strict=True):
        text = prefix.tolist()
        assert row[: len(text)].tolist() == text
        assert row[len(text) : len(text) + 5].tolist() == tokens.tolist()
        for token, number in zip(tokens.tolist(), uniform, strict=True):
            cumulative = lm(torch.tensor([text])).logits[0, -1].softmax(-1).cumsum(-1)
            assert cumulative[token] >= number - 1e-5
            assert token == 0 or cumulative[token - 1] <= number + 1e-5
            text.append(token)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(continue_prefixes(lm, prefixes, numbers, VOCABULARY)[0], ids)  # in full precision always
    narrow, _ = continue_prefixes(lm, prefixes, numbers, 50)
    assert all((row[len(p) :] < 50).all() for row, p in zip(narrow, prefixes, strict=True))


def test_a_prefix_is_the_document_up_to_a_supervised_place() -> None:
    rows = {name: value[0] for name, value in batch(length=20).items()}
    seen = set()
    for seed in range(60):
        prefix = choose_prefix(
            rows["input_ids"], rows["labels"], rows["positions"], 15, np.random.default_rng(seed)
        ).tolist()
        assert 1 <= len(prefix) <= 5
        seen.add(tuple(prefix))
    ids, places = rows["input_ids"].tolist(), (rows["labels"] != IGNORE).nonzero()[:, 0].tolist()
    expected = {tuple(ids[max(place - place % 10, place - 4) : place + 1]) for place in places}
    assert seen == expected


def test_labels_of_samples_end_with_the_first_end_token() -> None:
    ids = torch.tensor([[1, 2, 7, 8, 9, 7], [3, 4, 5, 6, 8, 0]])
    sampled = torch.tensor([[7, 8, 9], [4, 5, 6]])
    labels = label_samples(ids, [2, 1], sampled, {8, 99})
    assert labels.tolist() == [[IGNORE, 7, 8, IGNORE, IGNORE, IGNORE], [4, 5, 6, IGNORE, IGNORE, IGNORE]]
    assert label_samples(ids, [2, 1], sampled, ())[0].tolist() == [IGNORE, 7, 8, 9, IGNORE, IGNORE]

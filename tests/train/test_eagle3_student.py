"""Training-time test over all positions at once equals drafting position by position: values and gradients."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.draft_models.acceptance import tau_of_rounds
from outrider.draft_models.eagle3.checkpoint import new_head
from outrider.draft_models.eagle3.model import Steps
from outrider.draft_models.eagle3.reading import new_reading
from outrider.draft_models.losses import DIVERGENCES, IGNORE, linear_cross_entropy, linear_divergence
from outrider.draft_models.targets.target import Band
from outrider.train import eagle3
from outrider.train.eagle3 import Eagle3Student
from outrider.train.parts import head_student, steps
from outrider.train.parts.head_student import HeadStudent, score_batch, score_steps
from outrider.train.parts.head_training import plan_memory
from outrider.train.parts.on_policy import draw_depths, row_generator
from outrider.train.parts.steps import QueriesAt, acceptance_of_drafts
from outrider.train.settings.fit import FitConfig
from tests.eagle3_heads import Facts, Row, reference
from tests.faults import plant
from tests.fitted_heads import hidden_of
from tests.tiny import VOCABULARY, open_stack
from tests.train.test_position_weights import slot_weight

TOKENS = torch.arange(0, VOCABULARY, 3)
STEPS, DECAY, TAPS = 3, 0.5, (1, 2, 4)
OPTIONS = {"draft_steps": STEPS, "step_decay": DECAY, "position_weights": "decay", "train_head": True}
DOCUMENTS = [[0] * 7 + [1] * 5, [0] * 9 + [1] * 1 + [-1] * 2]


@dataclass(frozen=True)
class Case:
    """A student, rows for it, and its target's aux hidden states and logits for each document."""

    student: Eagle3Student
    batch: dict[str, Tensor]
    taps: Tensor  # [B, T, k, H]
    logits: Tensor  # [B, T, V]
    facts: Facts
    reference: Callable[..., list[Tensor]] = reference


@pytest.fixture(params=["3", "3.1"])
def case(request: pytest.FixtureRequest, target: Path) -> Case:
    return a_case(target, request.param, TOKENS, keep={"3": 1.0, "3.1": 0.6}[request.param])


def a_case(
    target: Path, version: str, tokens: Tensor | None, objective: str = "forward_kl", keep: float = 1,
    weights: str = "decay",
) -> Case:  # fmt: skip
    model, stack = open_stack(target)
    size = None if tokens is None else len(tokens)
    reading = new_reading(model.config, taps=TAPS, version=version, draft_vocabulary=size, intermediate=24)
    head = new_head(reading, stack, tokens, seed=1)
    torch.manual_seed(5)
    for parameter in head.parameters():  # norms of 1 would hide a confusion of them
        size = parameter.std() if parameter.ndim > 1 else 1.0
        parameter.data += 0.2 * size * torch.randn_like(parameter)
    options = OPTIONS | {"objective": objective, "keep": keep, "position_weights": weights}
    config: Any = SimpleNamespace(**options, fit=FitConfig(steps=1, seed=4))
    newer = frozenset({"tap norms", "norm output"}) if version == "3.1" else frozenset[str]()
    facts = Facts(
        taps=TAPS, config={}, width=64, head_dim=16, theta=reading.rope["rope_theta"], epsilon=reading.epsilon,
        draft_tokens=tuple(range(VOCABULARY) if tokens is None else tokens.tolist()), on=newer, prefix="layers.0.",
    )  # fmt: skip
    return with_rows(target, Eagle3Student(stack, head, config), facts)


def with_rows(target: Path, student: Eagle3Student, facts: Any, make: Callable[..., list[Tensor]] = reference) -> Case:
    """The case of a student on the target in `target`. make: the reference for its head."""
    documents = torch.tensor(DOCUMENTS)
    ids = torch.randint(256, documents.shape, generator=torch.Generator().manual_seed(2))
    positions, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
    taps, logits = torch.zeros(*ids.shape, len(facts.taps), 64), torch.zeros(*ids.shape, VOCABULARY)
    whole = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    for b, row in enumerate(DOCUMENTS):
        for document in set(row) - {-1}:
            where = [i for i, owner in enumerate(row) if owner == document]
            positions[b, where] = torch.arange(len(where))
            labels[b, where[:-1]] = ids[b, where[1:]]
            states, logits[b, where] = boundaries(whole, ids[b, where])
            taps[b, where] = torch.stack([states[tap] for tap in facts.taps], 1)
    labels[0, 2] = IGNORE  # an unsupervised position between others
    batch = {"input_ids": ids, "labels": labels, "positions": positions, "documents": documents}
    return Case(student, batch, taps, logits, facts, make)


@torch.no_grad()
def boundaries(whole: PreTrainedModel, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """The input [T, H] of each layer in transformers' forward, the output of the last one, and logits."""
    found: list[Tensor] = []
    inner: Any = whole.model
    hooks = [layer.register_forward_pre_hook(lambda _, given: found.append(given[0][0])) for layer in inner.layers]
    hooks.append(inner.norm.register_forward_pre_hook(lambda _, given: found.append(given[0][0])))
    logits = whole(ids[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return found, logits


def drafts(case: Case, weights: dict[str, Tensor]) -> dict[tuple[int, int, int], Tensor]:
    """Logits [V_d] of (row, position, step), each document alone, each draft as the runtime makes it."""
    found = {}
    embedding = case.student.stack.embed_tokens.weight.detach()
    for b, owners in enumerate(DOCUMENTS):
        for document in set(owners) - {-1}:
            where = [i for i, owner in enumerate(owners) if owner == document]
            ids = case.batch["input_ids"][b, where].tolist()
            rows, names = [], []
            number: dict[tuple[int, int], int] = {}
            for step in range(STEPS):
                for place in range(len(where) - 1 - step):
                    own = [number[place, before] for before in range(1, step)]
                    sees = [*(number[at, 0] for at in range(place + (step > 0))), *own]
                    feature = case.taps[b, where[place]] if step == 0 else number[place, step - 1]
                    number[place, step] = len(rows)
                    rows.append(Row(ids[place + 1 + step], place + step, sees, feature))
                    names.append((b, where[place], step))
            found |= dict(zip(names, case.reference(case.facts, weights, embedding, rows), strict=True)) if rows else {}
    return found


def expected(case: Case, objective: str, weights: dict[str, Tensor]) -> Tensor:
    """The loss, one prediction after the other."""
    kind, drafted, total = case.student.position_weights, drafts(case, weights), torch.zeros(())
    decay = DECAY if kind == "decay" else 1.0
    all_shares, tokens = sum(decay**step for step in range(STEPS)), torch.tensor(case.facts.draft_tokens)
    every, own, keep = torch.eye(VOCABULARY), torch.eye(len(tokens)), case.student.keep
    drawn = [row_generator(4, case.student.step, ids).random(len(ids)) for ids in case.batch["input_ids"]]

    def is_trained(b: int, place: int, step: int) -> bool:
        if (b, place, step) not in drafted or drawn[b][place] >= keep**step:
            return False
        label = case.batch["labels"][b, place + 1 + step]
        return bool(label != IGNORE and (objective != "cross_entropy" or label in tokens))

    def weight(b: int, place: int, step: int) -> float:
        """Of a slot, by the probabilities of the labels of its draft."""
        labels, p, q = case.batch["labels"][b, place + 1 :], list[float](), list[float]()
        for slot in takewhile(lambda slot: is_trained(b, place, slot), range(STEPS)):
            p.append(case.logits[b, place + 1 + slot].softmax(-1)[labels[slot]].item())
            q.append((drafted[b, place, slot].softmax(-1) * (tokens == labels[slot])).sum().item())
        return slot_weight(kind, step, p, q)

    for (b, place, step), logits in drafted.items():
        at = place + 1 + step  # the position of the predicted label
        if not is_trained(b, place, step):
            continue
        one, label = torch.zeros(1, dtype=torch.long), case.batch["labels"][b, at]
        if objective == "cross_entropy":
            loss = linear_cross_entropy(logits[None], own, (tokens == label).nonzero()[:, 0])
        else:
            given = (logits[None], own, case.logits[b, at][None], every, one, objective)
            loss = linear_divergence(*given, tokens=tokens)
        total = total + weight(b, place, step) * decay**step / all_shares / keep**step * loss
    return total


def leaves(case: Case) -> dict[str, Tensor]:
    """Copies of the head's weights by their names."""
    state = case.student.head.state_dict()
    return {name: value.clone().requires_grad_() for name, value in state.items() if value.is_floating_point()}


def assert_same(case: Case, objective: str = "forward_kl") -> None:
    weights = leaves(case)
    wanted = expected(case, objective, weights)
    wanted.backward()
    loss = case.student(**case.batch)["loss_sum"]
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
    for name, parameter in case.student.head.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_loss_and_gradients_are_those_of_drafts_place_by_place(case: Case) -> None:
    assert_same(case)


@pytest.mark.parametrize(
    ("weights", "objective"), [("cat", "forward_kl"), ("dpace", "cross_entropy"), ("none", "kl_tv")]
)
def test_steps_are_weighted_place_by_place(target: Path, weights: str, objective: str) -> None:
    assert_same(a_case(target, "3.1", TOKENS, objective, keep=0.9, weights=weights), objective)


def test_what_is_watched_is_of_drafts_place_by_place(case: Case) -> None:
    sums, accepted = score_batch(case.student, case.batch, STEPS)
    wanted, tokens = torch.full_like(accepted, torch.nan), torch.tensor(case.facts.draft_tokens)
    with torch.no_grad():
        for (b, place, step), logits in drafts(case, leaves(case)).items():
            at = place + 1 + step
            if case.batch["labels"][b, at] != IGNORE:
                q = torch.zeros(VOCABULARY).index_copy(0, tokens, logits.softmax(-1))
                wanted[b, at, step] = torch.minimum(case.logits[b, at].softmax(-1), q).sum()
    torch.testing.assert_close(accepted, wanted, equal_nan=True)
    assert sums[:, 0].tolist() == (~wanted.isnan()).sum((0, 1)).tolist()


def test_a_watched_cross_entropy_is_of_the_tokens_that_the_head_has(target: Path) -> None:
    case, losses = a_case(target, "3.1", TOKENS, "cross_entropy"), list[float]()
    with torch.no_grad():
        for (b, place, step), logits in drafts(case, leaves(case)).items():
            is_label = case.batch["labels"][b, place + 1 + step] == TOKENS
            losses += (-logits.log_softmax(-1)[is_label & (step == 0)]).tolist()
    metrics = score_steps(case.student, [case.batch], STEPS)
    assert metrics["loss_1"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.parametrize("beside", [False, True])
def test_long_and_recomputed_steps_are_the_same(case: Case, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """beside: rows side by side, as on a GPU: a step has as many positions of each row, and blocks of all rows."""
    monkeypatch.setattr(Band, "BLOCK", 5)
    if beside:
        plant(monkeypatch, Eagle3Student, "unroll", '== "cpu"', '== "none"')
        for module in (eagle3, steps):
            plant(monkeypatch, module, "packed_band", '== "cpu"', '== "none"')
    case.student.gradient_checkpointing_enable()
    assert_same(case)


@pytest.mark.parametrize("objective", ["cross_entropy", *DIVERGENCES])
@pytest.mark.parametrize("some", [True, False])
def test_every_objective_is_what_it_says(target: Path, objective: str, some: bool) -> None:
    case = a_case(target, "3.1", TOKENS if some else None, objective)
    with torch.no_grad():
        wanted = expected(case, objective, leaves(case))
        torch.testing.assert_close(case.student(**case.batch)["loss_sum"], wanted, rtol=1e-4, atol=1e-5)


def test_depths_are_kept_at_their_shares_of_the_positions() -> None:
    """By which the weights of losses are divided; and with a depth all before it are."""
    kept = draw_depths(0.5, 3, 0, 1, torch.arange(9000).view(30, -1)).float()
    torch.testing.assert_close(kept.mean((0, 1)), torch.tensor([1, 0.5, 0.25]), rtol=0, atol=0.02)
    assert torch.equal(kept, kept.cummin(-1).values)


def test_in_bfloat16_the_gradient_points_the_same_way(target: Path) -> None:
    """Under autocast, which rounds keys and queries after the rotation."""
    found = []
    for on in (False, True):
        case = a_case(target, "3.1", TOKENS)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = case.student(**case.batch)["loss_sum"]
        loss.backward()
        found.append((loss.item(), {name: p.grad for name, p in case.student.head.named_parameters()}))
    (exact, wanted), (rounded, given) = found
    assert exact != rounded == pytest.approx(exact, rel=0.02)
    for name, gradient in wanted.items():
        assert torch.cosine_similarity(given[name].flatten(), gradient.flatten(), dim=0) > 0.98, name


@pytest.mark.parametrize("version", ["3", "3.1"])
def test_a_draft_of_the_runtime_is_what_was_learnt_from(target: Path, version: str) -> None:
    """Its outputs after a text and the next tokens of it equal those of the steps at that position."""
    case = a_case(target, version, None)
    head, stack = copy.deepcopy(case.student.head).requires_grad_(False), case.student.stack
    head.use_embedding(stack.embed_tokens.weight)
    text = case.batch["input_ids"][0, :7].tolist()  # the first document
    row = {name: value[:1] for name, value in case.batch.items()}
    with torch.no_grad():
        states = case.student.target_states(row["input_ids"], row["positions"], row["documents"])
        taps = states[:, :, :-1].flatten(2)
        for place in (0, 2, 3):
            wanted = torch.zeros(*row["input_ids"].shape, STEPS, dtype=torch.bool)
            wanted[:, place] = True
            learnt = case.student.unroll(row["input_ids"], row["positions"], row["documents"], taps, wanted)
            drafted = hidden_of(stack, head, text[: place + 1], text[place + 1 : place + 1 + STEPS])
            for step, hidden in enumerate(drafted):
                torch.testing.assert_close(learnt.hidden[step], hidden, rtol=1e-4, atol=1e-4)


UNROLLED = (Eagle3Student, "unroll")
FAULTS = {  # where, and what stands there instead
    "all steps have the first one's positions": (Eagle3Student, "_run_step", "positions + step", "positions"),
    "a document attends to the one before it": (*UNROLLED, "packed_band(documents)", "packed_band(0 * documents)"),
    "a draft continues into the next document": (
        head_student,
        "loss_mask_per_step",
        "== documents[",
        ">= 0 * documents[",
    ),
    "labels of the input token of step 0": (
        Eagle3Student,
        "forward",
        " draft_tokens =",
        " labels = labels.roll(1, 1)\n    draft_tokens =",
    ),
    "steps between are not attended to": (Steps, "attend", "self.step > 1", "False"),
    "keys of other positions": (Steps, "attend", "= entry\n", "= entry[0].roll(1, 2), entry[1]\n"),
    "entries between of other positions": (Steps, "_pick_positions", "(flat_indices, e", "(flat_indices.roll(1, 1), e"),
    "outputs of other positions": (*UNROLLED, "(picks, features.", "(picks.roll(1, 1), features."),
    "the tokens of step 0": (*UNROLLED, "indices + 1 + step) %", "indices + 1) %"),
    "positions that only later steps need": (*UNROLLED, "(loss_mask.flip(-1).cumsum(-1).flip(-1) > 0)", "loss_mask"),
    "the next entry is seen": (QueriesAt, "block", "keys <= self.last", "keys <= 1 + self.last"),
    "drawn for another step": (eagle3, "draw_depths", "(seed, step, row)", "(seed, 1 + step, row)"),
    "drawn, with the weight of all": (HeadStudent, "__init__", "weights.sum() / position_shares", "weights.sum()"),
    "drawn, with a weight that is not the inverse": (HeadStudent, "__init__", "/ position_shares", "* position_shares"),
    "predictions in the order of steps": (*UNROLLED, "(output_rows)[order]", "(output_rows)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(target: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant(monkeypatch, *FAULTS[fault])
    with pytest.raises(AssertionError, match=r"Tensor-likes are not close|Scalars are not close"):
        assert_same(a_case(target, "3", TOKENS, keep=0.6 if fault.startswith("drawn") else 1.0))


@pytest.mark.parametrize("recomputed", [True, False])
def test_a_plan_says_about_what_the_steps_keep(target: Path, recomputed: bool) -> None:
    """At least what they keep, and less than twice that; it grows with the number of steps."""
    case = a_case(target, "3.1", TOKENS)
    if recomputed:
        case.student.gradient_checkpointing_enable()
    ids = torch.randint(256, (2, 64))
    rows = {"input_ids": ids, "labels": ids.roll(-1, 1), "documents": torch.zeros_like(ids)}
    rows["positions"] = torch.arange(64).expand(2, -1)
    weights = {p.untyped_storage().data_ptr() for p in case.student.parameters()}
    kept = dict[int, torch.UntypedStorage]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _loss = case.student(**rows)["loss_sum"]
    taken = sum(storage.nbytes() for storage in kept.values()) / ids.numel()
    fit = FitConfig(steps=1, batch_rows=2, gradient_checkpointing=recomputed)
    config: Any = SimpleNamespace(**OPTIONS, objective="", keep=1.0, fit=fit, seq_len=64, frozen_dtype="float32")
    reading, shape = case.student.head.reading, case.student.stack.config
    plan = plan_memory(config, reading, shape, eagle3.kind_of(config, None, reading, shape))
    (planned,) = (one.size for one in plan.parts if one.purpose.startswith("activations"))
    assert taken < planned / ids.numel() < 2 * taken


def test_the_analytic_tau_is_of_drafts_that_begin_at_one_place() -> None:
    accepted = torch.full((1, 7, 5), torch.nan)
    for step in range(4):  # the draft after position 1
        accepted[0, 2 + step, step] = 0.5 + 0.1 * step
    accepted[0, 1, 0] = 0.9  # the first token of a document without a second one
    wanted = 1 + 0.5 + 0.5 * 0.6 + 0.5 * 0.6 * 0.7 + 0.5 * 0.6 * 0.7 * 0.8
    assert tau_of_rounds(acceptance_of_drafts(accepted)).tolist() == [pytest.approx(wanted)]
    assert len(tau_of_rounds(acceptance_of_drafts(accepted[:, :4]))) == 0

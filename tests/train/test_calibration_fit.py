"""What is learnt from captured tokens: the head, its scores, and the temperatures of its product."""

import pytest
import torch

from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.losses import IGNORE
from outrider.train.calibrate import CalibrationStudent, Examples
from outrider.train.parts.calibration_scores import (
    MIN_ROUNDS,
    TEMPERATURES,
    brier_score,
    expected_calibration_error,
    fit_temperatures,
    predict_acceptance,
    reliability_curve,
    rounds_of,
    rounds_of_later_half,
    score_head,
    survival_products,
    temper_head,
)
from outrider.train.parts.capture import ROW_TOKENS
from tests.train.jobs import synthetic


def drawn_rounds(bias: float, scale: float, count: int, seed: int) -> dict[str, torch.Tensor]:
    """Rounds of 4 tokens whose logits are `scale` times too large; what comes after a wrong token has label 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = bias + torch.randn(count, 4, generator=generator)
    right = torch.rand(count, 4, generator=generator) < logits.sigmoid()
    labels = right.float().cumprod(1)
    return {"logits": scale * logits.flatten(), "position": torch.arange(1, 5).repeat(count), "label": labels.flatten()}


def confident(drawn: dict[str, torch.Tensor]) -> tuple[CalibrationHead, dict[str, torch.Tensor]]:
    """A head that says the logits of drawn rounds, and the rounds as they are captured."""
    head, tokens = CalibrationHead(1, 1).requires_grad_(False), len(drawn["label"])
    head.draft.fill_(1.0)
    batch = {"target_hidden": torch.zeros(tokens, 1), "draft_hidden": drawn["logits"][:, None]}
    batch |= {"position": drawn["position"], "label": drawn["label"], "confidence": torch.full((tokens,), 0.5)}
    return head, batch


def test_temperatures_undo_what_scaled_the_logits() -> None:
    drawn = drawn_rounds(1.0, 2.5, 4000, 0)
    rounds = rounds_of(**drawn)
    assert rounds.logits.shape == (4000, 4)
    assert torch.equal(rounds.accepted, drawn["label"].view(4000, 4).sum(1))
    found = fit_temperatures(rounds)
    torch.testing.assert_close(found[:4], torch.full((4,), 2.5), rtol=0.2, atol=0)
    assert found[4:].tolist() == [1.0] * 6
    products, right = survival_products(rounds, found)
    by_hand = (rounds.logits / found[:4]).sigmoid().cumprod(1)
    torch.testing.assert_close(products.view(4000, 4), by_hand)
    assert torch.equal(right.view(4000, 4), drawn["label"].view(4000, 4))  # of a product: all tokens up to there
    before, after = (
        expected_calibration_error(reliability_curve(*survival_products(rounds, each)))
        for each in (torch.ones(10), found)
    )
    assert after < 0.02 < 0.05 < before
    assert float((TEMPERATURES - 1).abs().min()) < 1e-6


def test_short_rounds_and_few_of_them() -> None:
    rounds = rounds_of(torch.tensor([3.0, -1.0, 2.0, 0.5]), torch.tensor([1, 2, 1, 1]), torch.tensor([1.0, 0, 0, 1]))
    assert rounds.exists.tolist() == [[True, True], [True, False], [True, False]]
    assert rounds.accepted.tolist() == [1, 0, 1]
    assert fit_temperatures(rounds).tolist() == [1.0] * 10
    assert survival_products(rounds, torch.ones(10))[1].tolist() == [1, 0, 0, 1]


def test_a_head_is_tempered_on_one_half_and_judged_on_the_other() -> None:
    head, batch = confident(drawn_rounds(1.0, 2.5, 2000, 1))
    found = temper_head(head, batch)
    assert found["rounds"] == 1000
    assert found["ece_after"] < 0.6 * found["ece_before"]
    assert head.temperature[:4].tolist() == pytest.approx(found["temperature"][:4], abs=1e-3)
    torch.testing.assert_close(head.temperature[:4], torch.full((4,), 2.5), rtol=0.3, atol=0)


def test_temperatures_that_do_not_help_are_not_kept() -> None:
    """Logits that were right: what a half of few rounds fits is noise, on the other half worse than none."""
    kept, fitted = [], []
    for seed in range(12):
        head, batch = confident(drawn_rounds(0.5, 1.0, 260, seed))
        tokens = len(batch["label"])
        found = temper_head(head, batch)
        kept.append(found["kept"])
        assert (head.temperature == 1).all() or found["kept"]
        fitted += [value for value in found["temperature"] if value != 1]
        later = rounds_of_later_half(batch)
        assert len(later["label"]) == tokens // 2
        assert torch.equal(later["label"], batch["label"][tokens // 2 :])
    assert not all(kept)
    assert fitted


def test_a_position_that_few_drafts_reached_has_no_temperature() -> None:
    """Rounds that ended before it have it too, but say nothing of it."""
    drawn = drawn_rounds(-1.5, 2.5, 600, 3)
    rounds = rounds_of(**drawn)
    reached = [int((rounds.accepted >= place).sum()) for place in range(4)]
    found = fit_temperatures(rounds)
    assert reached[0] == 600
    assert reached[3] < MIN_ROUNDS < reached[1]
    assert found[0] != 1
    assert found[3] == 1


def test_rows_hold_every_example_once() -> None:
    n = ROW_TOKENS + 7
    captured = {
        "target_hidden": torch.randn(n, 3), "draft_hidden": torch.randn(n, 2), "position": torch.arange(n),
        "confidence": torch.rand(n), "label": torch.randint(0, 2, (n,)).float(),
    }  # fmt: skip
    rows = Examples(captured)
    assert len(rows) == 2
    together = {name: torch.cat([rows[0][name], rows[1][name]]) for name in rows[0]}
    keep = together["labels"] != IGNORE
    assert keep.tolist() == [True] * n + [False] * (2 * ROW_TOKENS - n)
    assert torch.equal(together["labels"][keep], captured["label"].long())
    assert torch.equal(together["target_hidden"][keep], captured["target_hidden"])
    assert torch.equal(together["position"][keep], captured["position"])
    assert torch.equal(together["confidence"][keep], captured["confidence"])


def test_folding_changes_no_prediction_and_gradients_reach_the_head_only() -> None:
    captured = synthetic(200, 0)
    model = CalibrationStudent(captured, l2=100)
    untrained = predict_acceptance(model.fold_standardisation(), captured)
    odds = captured["confidence"].logit()  # before it has learnt anything it shifts the draft's own
    torch.testing.assert_close(untrained, (odds - odds.mean() + captured["label"].mean().logit()).sigmoid())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    rows = Examples(captured)
    loss = sum(model(**{k: v[None] for k, v in rows[i].items()})["loss_sum"] for i in range(len(rows)))
    predicted = predict_acceptance(model.fold_standardisation(), captured)
    entropy = torch.nn.functional.binary_cross_entropy(predicted, captured["label"], reduction="sum")
    penalty = sum(weights.square().sum() for weights in (model.head.target, model.head.draft))
    torch.testing.assert_close(loss, entropy + 100 * penalty, rtol=1e-4, atol=1e-3)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.head.parameters())
    other = captured | {"target_hidden": 70 * captured["target_hidden"] + 3}
    scaled, rows = CalibrationStudent(other, l2=100), Examples(other)
    scaled.head.load_state_dict(model.head.state_dict())
    again = sum(scaled(**{k: v[None] for k, v in rows[i].items()})["loss_sum"] for i in range(len(rows)))
    torch.testing.assert_close(again, loss, rtol=1e-4, atol=1e-3)  # so one learning rate and one l2 fit any model


def test_the_papers_head_sees_hidden_states_alone() -> None:
    """However sure the draft was, it says the same; ours does not. It keeps no temperatures, which would help here."""
    captured, gradients = synthetic(200, 0), {}
    surer = captured | {"confidence": captured["confidence"] ** 3}
    for odds in (True, False):
        model = CalibrationStudent(captured, l2=100, odds=odds)
        with torch.no_grad():
            model.head.target.normal_()
        rows = Examples(captured)
        sum(model(**{k: v[None] for k, v in rows[i].items()})["loss_sum"] for i in range(len(rows))).backward()
        gradients[odds] = {name for name, weight in model.head.named_parameters() if weight.grad is not None}
        head = model.fold_standardisation()
        assert torch.equal(predict_acceptance(head, captured), predict_acceptance(head, surer)) is not odds
    assert gradients[True] - gradients[False] == {"odds"}
    tempered, batch = confident(drawn_rounds(1.0, 2.5, 2000, 1))
    assert not temper_head(tempered, batch, keep=False)["kept"]
    assert tempered.temperature.tolist() == [1.0] * 10


def test_scores_by_hand() -> None:
    predicted, label = torch.tensor([0.05, 0.95, 0.95, 0.55]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert brier_score(predicted, label) == pytest.approx((0.05**2 + 0.05**2 + 0.95**2 + 0.45**2) / 4)
    curve = reliability_curve(predicted, label)
    assert [row["count"] for row in curve] == [1, 1, 2]
    assert expected_calibration_error(curve) == pytest.approx((0.05 + 0.45 + 2 * 0.45) / 4)
    assert reliability_curve(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))[-1]["predicted"] == 1.0


def test_a_head_of_the_right_form_beats_the_other_predictors() -> None:
    train, heldout = synthetic(6000, 0), synthetic(3000, 1)
    model, rows = CalibrationStudent(train, l2=0.6), Examples(train)
    batch = {name: torch.stack([rows[i][name] for i in range(len(rows))]) for name in rows[0]}
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch)["loss_sum"]
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    scores = score_head(model.fold_standardisation(), train, heldout)["predictors"]
    assert scores["head"]["brier"] < 0.7 * min(scores["constant"]["brier"], scores["confidence"]["brier"])
    assert scores["head"]["ece"] < 0.03
    constant = torch.full_like(heldout["label"], float(train["label"].mean()))
    assert scores["constant"]["brier"] == pytest.approx(brier_score(constant, heldout["label"]))
    assert scores["confidence"]["brier"] == pytest.approx(brier_score(heldout["confidence"], heldout["label"]))

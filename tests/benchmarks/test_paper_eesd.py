"""EESD's predicted speed-up."""

import pytest


def test_the_predicted_speed_up_is_equation_14() -> None:
    """From v_d, r_d and α, where every round is a pass over one token; here 40 of 100 tokens came from 80 drafted."""
    from papers.claims import quantity

    drafted, accepted, output, pass_seconds, draft_seconds = 80, 40, 100, 0.2, 0.03
    counts = {"plain_seconds": output * pass_seconds, "timed": output, "timed_rounds": output - accepted,
              "draft_seconds": drafted * draft_seconds}  # fmt: skip
    v_d, r_d, alpha = accepted / drafted, accepted / output, draft_seconds / pass_seconds
    assert quantity("predicted").of(counts) == pytest.approx(v_d / ((alpha - v_d) * r_d + v_d))

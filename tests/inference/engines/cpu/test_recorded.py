"""Choices of a clock that are made once, and then are a matter of record."""

import pytest

from inference.engines.cpu.recorded import recorded, settle
from outrider.errors import UserError


def asked(answer: str) -> str:
    return settle("8×8 in float32", ("plain", "blocked"), lambda: answer)


def test_a_question_has_one_answer() -> None:
    assert [asked("plain"), asked("blocked")] == ["plain", "blocked"]  # where nobody records
    with recorded() as made:
        assert [asked("plain"), asked("blocked")] == ["plain", "plain"]
        with recorded({"8×8 in float32": "blocked"}) as inner:
            assert asked("blocked") == "plain"
        assert inner is made
    assert made == {"8×8 in float32": "plain"}
    with recorded(made):
        assert asked("blocked") == "plain"
    with recorded():
        assert asked("blocked") == "blocked"


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (
            {"8×8 in float32": "panels"},
            r"8×8 in float32 by the kernel 'panels'.*one of plain, blocked.*out_dir",
        ),
        ({}, "does not record by what kernel it multiplied 8×8 in float32"),
    ],
)
def test_what_cannot_be_kept_is_refused(known: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message), recorded(known):
        asked("plain")

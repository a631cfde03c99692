"""`outrider COMMAND`: the list of commands, and any of them run by its name."""

import sys

import pytest

from outrider import cli


def run(monkeypatch: pytest.MonkeyPatch, *typed: str) -> int:
    """The exit status of `outrider` with these words."""
    monkeypatch.setattr(sys, "argv", ["outrider", *typed])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_every_command_is_listed_with_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    for command in cli.COMMANDS.values():
        assert any(line.split() == [command.typed, *command.does.split()] for line in lines)


@pytest.mark.parametrize("typed", ["compare-reports", "compare_reports"])
def test_a_command_runs_with_its_options(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, typed, "compare=[nothing,here]") == 2
    assert "nothing" in capsys.readouterr().err
    assert run(monkeypatch, typed, "--help") == 0
    assert "compare=" in capsys.readouterr().out


def test_a_command_is_told_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it can say how it is to be typed again."""
    told: list[list[str]] = []
    monkeypatch.setattr("outrider.commands.carry_out", lambda *_: told.append(sys.argv))
    assert run(monkeypatch, "compare_reports", "compare=[a,b]") == 0
    assert told == [["outrider compare-reports", "compare=[a,b]"]]


def test_a_mistyped_command_gets_what_was_likely_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "evaluate-chekpoint") == 2
    error = capsys.readouterr().err
    assert "did you mean 'evaluate-checkpoint'" in error
    assert len(error.splitlines()) == 1

"""`--help` and docs/options.md: every option with its meaning, from where it is declared."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from conf import register
from conf.options import compose_defaults, groups_of, help_text, meanings_of, options_of
from docs.make_options import COMMANDS, PAGE, page
from outrider.settings import free, opt
from train.settings.drafters import EesdConfig

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    """Where it is not: python docs/make_options.py."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_meaning(name: str) -> None:
    schema = COMMANDS[name].load_settings()
    register(name, schema)
    options = list(options_of(schema, compose_defaults(name, [])))
    assert [option.key for option in options if not option.meaning] == []
    assert all("GGUF" in option.meaning for option in options if option.key == "target")
    keys = [option.key for option in options]
    assert len(set(keys)) == len(keys) >= 5


def test_help_is_of_this_command_and_of_what_is_chosen() -> None:
    register("eesd", EesdConfig)
    text = help_text("eesd", EesdConfig, ["data=ultrachat", "fit.lr=0.25"])
    assert "data.path=HuggingFaceH4/ultrachat_200k" in text
    assert "fit.lr=0.25   (number > 0)\n    the highest learning rate" in text
    assert (
        "exit_layer=null   (integer ≥ 1 or null)\n    of a new one: N, the target layers under the exit layer" in text
    )
    assert "target=   (text)" in text  # must be given
    assert set(groups_of("eesd")) == {"data", "experiment"}
    assert all(choice.startswith("eesd/") for choice in groups_of("eesd")["experiment"])
    assert "sweep" not in text


def test_a_meaning_is_an_argument_or_stands_after_the_field() -> None:
    assert meanings_of(Declared) == {"first": "of the base", "second": "in two lines", "third": "here", "fourth": ""}


@dataclasses.dataclass(kw_only=True)
class Base:
    """Settings of a test."""

    first: int = opt(help="of the base")


@dataclasses.dataclass(kw_only=True)
class Declared(Base):
    """More of them."""

    second: str = "# no comment"
    """in
    two lines"""
    third: dict[str, int] = free(factory=dict, help="here")
    fourth: int = 4  # no meaning


@pytest.mark.slow
def test_the_command_prints_it_without_torch_and_whoever_reads_may_leave() -> None:
    command = [sys.executable, ROOT / "train/eesd.py", "--help"]
    whole = subprocess.run(command, capture_output=True, text=True, check=True)
    assert whole.stdout.startswith("outrider eesd target=MODEL ")
    assert whole.stderr == ""
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stderr is not None
    reader.stdout.close()
    assert reader.stderr.read() == ""
    assert reader.wait() == 0
    bad = subprocess.run([*command, "nonsense=1"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: nonsense: no such option")

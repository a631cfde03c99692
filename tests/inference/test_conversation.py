"""The chat: the target's own answers, whoever drafts, in colours that say who said what, and never in its way."""

import io
import os
import pty
import re
import select
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders

import outrider
from outrider.base.errors import UserError
from outrider.draft_models.early_exit.checkpoint import save_pretrained
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.conversation import DRAFTED, Chat, Screen, harmless, open_screen
from outrider.inference.core.rounds import Round
from outrider.inference.settings.tools import ChatConfig
from tests.forked import Fork
from tests.tiny import LAYERS, byte_tokenizer, make_drafter, save_target

TURNS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}a:{% endif %}"
SGR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_target(tmp_path_factory.mktemp("models") / "target", kv_heads=2, seed=1)
    byte_tokenizer(TEMPLATE).save_pretrained(path)
    drafter = make_drafter(path, LAYERS - 1, noise=0.1)
    save_pretrained(path.parent / "drafter", drafter, open_target(str(path)).fingerprint, {}, torch.float32)
    return path.parent


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    loaded = outrider.load(folder / "drafter", device="cpu", method="eesd_fixed")
    loaded.tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # its bytes make no characters: each shows as a letter
    return loaded


def talk(model: Any, *lines: str, screen: Callable[[io.StringIO], Screen] = Screen, **options: Any) -> tuple[Chat, str]:
    """A chat in which those lines are typed, and all that it showed."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    chat = Chat(model, ChatConfig(target="t", **{"max_new_tokens": 12, **options}), screen(out), read)
    chat.run()
    return chat, out.getvalue()


def answers(shown: str) -> list[str]:
    """What was said between the notes."""
    parts = re.split(r"^\[.*\]$", shown.partition("\n")[2], flags=re.M)
    return [part.strip("\n") for part in parts[:-1]]


def test_every_answer_is_the_targets_own(model: Any) -> None:
    """With the drafter, without it, with another; and a second question is asked with the first answer before it."""
    ask = "def f("
    again = ("/off", "/reset", ask, "go on", "/method prompt_lookup", "/reset", ask)
    chat, shown = talk(model, ask, "go on", *again, "/quit", "no")
    first = model.generate([{"role": "user", "content": ask}], max_new_tokens=12)
    history = [{"role": "user", "content": ask}, {"role": "assistant", "content": first}]
    history[1]["ids"] = list(model.last.ids)  # a text of half characters does not give them
    second = model.generate([*history, {"role": "user", "content": "go on"}], max_new_tokens=12)
    assert answers(shown) == [first, second, first, second, first]
    assert len({first, second}) == 2
    figures = re.findall(r"\[(.+?): 12 tokens, τ (\d\.\d\d), ", shown)
    assert [name for name, _ in figures] == ["eesd_fixed"] * 2 + ["no drafter"] * 2 + ["prompt_lookup"]
    assert [tau for _, tau in figures[2:4]] == ["1.00"] * 2
    assert float(figures[0][1]) > 1
    assert chat.messages == history
    assert chat.model.stack is model.stack  # loaded once


def test_what_was_drafted_has_its_own_colour(model: Any) -> None:
    rounds = list(model.rounds([{"role": "user", "content": "def f("}], max_new_tokens=12))
    _, plain = talk(model, "def f(")
    _, shown = talk(model, "def f(", screen=partial(Screen, coloured=True))
    drafted = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown))
    assert len(drafted) == sum(r.accepted for r in rounds) > 0
    conversation = re.sub(r"\x1b7.*?\x1b8|\n\x1b\[A", "", shown, flags=re.S)  # the status line stands apart
    assert answers(SGR.sub("", conversation)) == answers(plain)
    assert re.findall(r"eesd_fixed: \d+ tokens, τ", "".join(re.findall(r"\x1b7(.*?)\x1b8", shown, flags=re.S)))


class Stopped:
    """A model that is stopped by Ctrl-C after two rounds, once."""

    name = "stopped"
    tokenizer, ends = byte_tokenizer(), frozenset[int]()

    def __init__(self) -> None:
        self.asked = 0

    def rounds(self, messages: list[dict[str, str]], *_: Any, **__: Any) -> Iterator[Round]:
        self.asked += 1
        h, i, j, k = self.tokenizer("hijk")["input_ids"]
        yield Round((h,), 0, 0, 0, 0.0)
        yield Round((i, j), 2, 1, 2, 0.0)
        if self.asked == 1:
            raise KeyboardInterrupt
        if self.asked == 2:
            raise UserError("too long")
        yield Round((k,), 0, 0, 0, 0.0)


def test_ctrl_c_and_errors_stop_an_answer_and_not_the_chat() -> None:
    chat, shown = talk(Stopped(), "one", "two", "three")
    assert [message["content"] for message in chat.messages] == ["one", "hij", "two", "hij", "three", "hijk"]
    assert "hij …\n" in shown
    assert "error: too long; /reset" in shown
    typed: Iterator[Any] = iter([KeyboardInterrupt, "/quit"])

    def read(_: str) -> str:
        line = next(typed)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(line)

    out = io.StringIO()
    Chat(Stopped(), ChatConfig(target="t"), Screen(out), read).run()
    assert "/quit leaves" in out.getvalue()


def test_what_cannot_be_done_is_said(model: Any) -> None:
    _, shown = talk(model, "/method nobody", "/method vanilla", "/unknown", "/off please", "x" * 250)
    assert "error: method=nobody: no such method" in shown
    assert "error: small_lm=None: expected" in shown  # what that method would need was not given
    assert shown.count("/method NAME") == 3
    assert "exceeds the target's context" in shown
    with pytest.raises(UserError, match="target=None: expected"):
        ChatConfig()


def test_a_model_cannot_command_the_terminal() -> None:
    assert harmless("a\x1b[2J\r\x07\tb\n\x9bc") == "a\ufffd[2J\ufffd\ufffd\tb\n\ufffdc"
    out = io.StringIO()
    Screen(out, coloured=True).say("\x1b]0;title\x07", DRAFTED)
    assert SGR.sub("", out.getvalue()) == "\ufffd]0;title\ufffd"


def test_colours_are_for_terminals_that_want_them() -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    assert open_screen(terminal, {}).coloured
    for out, environment in ((terminal, {"NO_COLOR": "1"}), (terminal, {"TERM": "dumb"}), (io.StringIO(), {})):
        assert not open_screen(out, environment).coloured


@pytest.mark.slow
def test_a_chat_through_a_terminal(folder: Path) -> None:
    """The command itself, typed at: answers in colours, Ctrl-C, /off, and an end that leaves the terminal as it was."""
    ours, theirs = pty.openpty()
    command = [
        "-m",
        "outrider.inference.chat",
        f"checkpoint={folder}/drafter",
        "method=eesd_fixed",
        "max_new_tokens=40",
    ]
    process = Fork(command, env={"TERM": "xterm", "NO_COLOR": ""}, terminal=theirs)
    os.close(theirs)
    shown = ""

    def wait_for(pattern: str) -> None:
        nonlocal shown
        deadline, start = time.monotonic() + 240, len(shown)
        while not re.search(pattern, shown[start:]):
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 65536).decode(errors="replace")

    wait_for("> $")
    for typed, expected in (
        ("def f(\n", r"\[eesd_fixed: 40 tokens, τ[^>]*> $"),
        ("again\n", r"again\s"),
        ("\x03", "> $"),  # apart: a terminal drops what was typed before it and not read yet
        ("/off\n/reset\ndef f(\n", r"\[no drafter: 40 tokens, τ 1\.00"),
    ):
        os.write(ours, typed.encode())
        wait_for(expected)
    os.write(ours, b"/quit\n")
    process.communicate(timeout=60)
    assert process.returncode == 0, shown
    while select.select([ours], [], [], 0.2)[0]:
        try:
            shown += os.read(ours, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            break
    os.close(ours)
    assert "\x1b[32m" in shown
    assert shown.rindex("\x1b[r") > shown.rindex("/quit")  # the last row is given back
    assert "Traceback" not in shown

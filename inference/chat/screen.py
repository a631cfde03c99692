"""Where a chat is shown: a terminal with colours and a status line, or plain text."""

import os
import shutil
import unicodedata
from collections.abc import Mapping
from typing import TextIO

DRAFTED, OWN = "drafted", "own"  # whose a token is: the drafter's, accepted by the target, or the target's
_COLOURS = {DRAFTED: "\x1b[32m", OWN: "\x1b[34m"}
_RESET, _DIM = "\x1b[0m", "\x1b[2m"


class Screen:
    """Plain text: what is said, and one line of figures after every answer."""

    def __init__(self, out: TextIO):
        self._out = out

    def say(self, text: str, whose: str) -> None:
        """A part of an answer."""
        self._write(harmless(text))

    def status(self, text: str) -> None:
        """How the answer goes so far."""

    def note(self, text: str) -> None:
        """A line that is no part of the conversation."""
        self._write(f"{text}\n")

    def close(self) -> None:
        """Nothing comes after this."""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Terminal(Screen):
    """Tokens in the colour of whoever said them; the last row of the terminal is kept for the status."""

    def __init__(self, out: TextIO):
        super().__init__(out)
        self._rows = 0

    def say(self, text: str, whose: str) -> None:
        self._write(f"{_COLOURS[whose]}{harmless(text)}{_RESET}")

    def status(self, text: str) -> None:
        size = shutil.get_terminal_size()
        if size.lines != self._rows:  # at first, and when the window has changed
            self._rows = size.lines
            self._write(f"\n\x1b[A\x1b7\x1b[1;{size.lines - 1}r\x1b8")  # what scrolls are the rows above the last
        self._write(f"\x1b7\x1b[{size.lines};1H\x1b[2K{_DIM}{text[: size.columns - 1]}{_RESET}\x1b8")

    def note(self, text: str) -> None:
        self._write(f"{_DIM}{text}{_RESET}\n")

    def close(self) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")


def open_screen(out: TextIO, environment: Mapping[str, str] = os.environ) -> Screen:
    """A `Terminal` where `out` is one and nothing asks for plain text (NO_COLOR, TERM=dumb)."""
    plain = not out.isatty() or environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return Screen(out) if plain else Terminal(out)


def harmless(text: str) -> str:
    """`text` without the characters by which a model could command the terminal; line ends and tabs stay."""
    kept = "\n\t"
    return "".join(c if c in kept or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)

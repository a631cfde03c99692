"""A chat in the terminal: user input, the target's answers, and the drafter's share of them."""

import os
import shutil
import time
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol, Self, TextIO

from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.data_prep.text.chat import StreamedText, spoken
from outrider.inference.core.rounds import Clock, Round
from outrider.inference.settings.method import MethodConfig
from outrider.inference.settings.tools import ChatConfig

HELP = "/off and /on: without and with the drafter; /method NAME: another way to draft; /reset: forget; /quit"
DRAFTED, OWN = "drafted", "own"  # the origin of a token: drafted and accepted, or the target's own
_COLOURS = {DRAFTED: "\x1b[32m", OWN: "\x1b[34m"}
_RESET, _DIM = "\x1b[0m", "\x1b[2m"


class Screen:
    """The answers, each followed by a line of figures.

    coloured: of a terminal. Tokens are coloured by origin, and its last row is reserved for a status line.
    """

    def __init__(self, out: TextIO, *, coloured: bool = False):
        self._out, self.coloured, self._rows = out, coloured, 0

    def say(self, text: str, whose: str) -> None:
        """Write a part of an answer; whose: `DRAFTED` or `OWN`."""
        self._write(harmless(text), _COLOURS[whose])

    def note(self, text: str) -> None:
        """Write a line that is not part of the conversation."""
        self._write(text, _DIM, end="\n")

    def status(self, text: str) -> None:
        """Show the status line; plain text has none."""
        if not self.coloured:
            return
        size = shutil.get_terminal_size()
        if size.lines != self._rows:  # on the first call, and after the window was resized
            self._rows = size.lines
            self._put(f"\n\x1b[A\x1b7\x1b[1;{size.lines - 1}r\x1b8")  # scroll only the rows above the last
        self._put(f"\x1b7\x1b[{size.lines};1H\x1b[2K{_DIM}{text[: size.columns - 1]}{_RESET}\x1b8")

    def close(self) -> None:
        """End the output."""
        if self._rows:
            self._put(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")

    def _write(self, text: str, colour: str, end: str = "") -> None:
        self._put((f"{colour}{text}{_RESET}" if self.coloured else text) + end)

    def _put(self, codes: str) -> None:
        self._out.write(codes)
        self._out.flush()


def open_screen(out: TextIO, environment: Mapping[str, str] = os.environ) -> Screen:
    """A coloured screen if `out` is a terminal and plain text is not requested (NO_COLOR, TERM=dumb)."""
    plain = environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return Screen(out, coloured=out.isatty() and not plain)


def harmless(text: str) -> str:
    """`text` with control characters replaced, which could control the terminal; line ends and tabs stay."""
    kept = "\n\t"
    return "".join(c if c in kept or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


class Speaker(Protocol):
    """The part of `outrider.Model` that a chat uses."""

    name: str

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def ends(self) -> frozenset[int]: ...
    @property
    def rounds(self) -> Callable[..., Iterator[Round]]: ...
    def by(self, method: str | MethodConfig, name: str | None = None) -> Self: ...


class Reply:
    """A streamed answer: its text and its figures.

    The prefill decides the first token, so neither τ nor the speed counts it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, clock: Clock, ends: Collection[int] = ()):
        self._clock, self._said = clock, StreamedText(tokenizer, ends)
        self.tokens, self.rest = self._said.tokens, self._said.rest
        self._passes, self._began, self._ended = -1, 0.0, 0.0

    def take(self, r: Round) -> Iterator[tuple[str, str]]:
        """The parts that a round adds to the text, each with its origin: drafter or target."""
        self._passes += 1
        self._ended = self._clock()
        if self._passes == 0:
            self._began = self._ended
        for whose, tokens in ((DRAFTED, r.tokens[: r.accepted]), (OWN, r.tokens[r.accepted :])):
            if text := self._said.add(tokens):
                yield text, whose

    def figures(self) -> str:
        """Tokens, τ and tokens per second as text."""
        decoded, seconds = len(self.tokens) - 1, self._ended - self._began
        if not self._passes or seconds <= 0:
            return f"{len(self.tokens)} tokens"
        return f"{len(self.tokens)} tokens, τ {decoded / self._passes:.2f}, {decoded / seconds:.1f} tokens/s"


class Chat:
    """A conversation and its decoding settings. `read` returns a line, or raises EOFError at the end of input."""

    def __init__(
        self, model: Speaker, config: ChatConfig, screen: Screen, read: Callable[[str], str],
        clock: Clock = time.perf_counter,
    ):  # fmt: skip
        self.model, self.config, self.screen = model, config, screen
        self._read, self._clock = read, clock
        self.speculate = True
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages: list[dict[str, object]] = []
        if self.config.system is not None:
            self.messages.append({"role": "system", "content": self.config.system})

    def run(self) -> None:
        """Talk until /quit or the end of the input. Ctrl-C stops an answer, not the chat."""
        self.screen.note(f"{HELP}; Ctrl-C stops an answer")
        self.screen.status(self._how())
        while True:
            try:
                line = self._read("> ").strip()
                if line == "/quit":
                    return
                if line.startswith("/"):
                    self._obey(*line[1:].split(maxsplit=1))
                elif line:
                    self._answer(line)
            except EOFError:
                return
            except KeyboardInterrupt:  # at the prompt, or outside `_answer`'s handler
                self.screen.note("\n/quit leaves")

    def _obey(self, command: str = "", name: str = "") -> None:
        if command in ("on", "off") and not name:
            self.speculate = command == "on"
        elif command == "reset" and not name:
            self.reset()
        elif command == "method" and name:
            try:
                self.model = self.model.by(self.config.methods.get(name, name), name)
                self.speculate = True
            except UserError as error:
                self.screen.note(f"error: {error}")
        else:
            self.screen.note(HELP)
        self.screen.status(self._how())

    def _answer(self, question: str) -> None:
        asked: list[dict[str, object]] = [*self.messages, {"role": "user", "content": question}]
        answer = Reply(self.model.tokenizer, self._clock, self.model.ends)
        try:
            rounds = self.model.rounds(
                asked, self.config.sampling, max_new_tokens=self.config.max_new_tokens,
                seed=self.config.seed, speculate=self.speculate,
            )  # fmt: skip
            for r in rounds:
                for text, whose in answer.take(r):
                    self.screen.say(text, whose)
                self.screen.status(f"{self._how()}: {answer.figures()}")
            self.screen.say(answer.rest(), OWN)
        except KeyboardInterrupt:
            self.screen.say(" …", OWN)
        except UserError as error:
            self.screen.note(f"error: {error}; /reset forgets the conversation")
        self.screen.say("\n", OWN)
        if text := spoken([token for token in answer.tokens if token not in self.model.ends], self.model.tokenizer):
            self.messages = [*asked, {"role": "assistant", "content": text, "ids": answer.tokens}]
        if answer.tokens:
            self.screen.note(f"[{self._how()}: {answer.figures()}]")

    def _how(self) -> str:
        return self.model.name if self.speculate else "no drafter"

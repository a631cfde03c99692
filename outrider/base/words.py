"""Texts for people: messages without secrets, times, tables, misspelt names, quoted values.

`outrider.base.errors` loads it with the first error: nothing of it is needed to decode.
"""

import difflib
import json
import os
import re
import shlex
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.base.errors import UserError

Columns = Mapping[str, tuple[str, str]]  # of a table: by a title, the template of its cells and what it says
_BARE = re.compile(r"(?!\.\d|(?i:null|true|false|nan|inf)$)[A-Za-z_/.][\w/.*-]*", re.ASCII)  # Hydra takes it as it is
_LONGEST, _END = 4000, 1000  # characters of a message, and of each end of a longer one
_NEAR = 2**16  # characters at each end of a text that are searched for secrets; the others are not shown
_FEWEST = 6  # characters of a secret: shorter values of such variables are switches
SECRET_NAME = re.compile(r"(?i)(key|token|secret|pass|password|passwd|credentials?|_pat)_?\d*$")
# In a URL of its own a password may have spaces, in a text it has none; it may have slashes, unless a port is before.
_LOGIN = re.compile(r"(['\"=][a-z][a-z0-9+.-]*://)[^'\"]{0,256}@|://(?:[^\s/]*|[^\s/:]*:(?!\d+[/?#])\S{0,256})@")
_FIELD = re.compile(
    r"(?i)((?:[?&][\w.-]{0,64}(?:key|token|sig|signature|auth)|"
    r"\b[\w.-]{0,64}(?:hf_token|access_token|api_?key|secret|password|passwd))(?:=|['\"]: ?)['\"]?)[^&\s'\"]+"
)
_SHAPE = re.compile(r"\b(?:hf_|sk-(?:\w+-)?|gh[pousr]_)[A-Za-z0-9]{20,}")  # a key without a name beside it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters of terminals
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s'\",]+")


def secret(name: str) -> str | None:
    """The key in the environment variable `name`, None without one. Raises `UserError` if no header can hold it."""
    key = os.environ.get(name) or None
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"{name}: the key in it has a line break or another character that no key has; set it again")
    return key


def clean(text: str) -> str:
    """`text` without secrets: values of variables that are named like keys, logins and keys in URLs, bearers' keys."""
    for name, value in os.environ.items():
        for part in re.split(r"[^ -~]+", value) if SECRET_NAME.search(name) else ():  # others are shown as escapes
            if len(part) >= _FEWEST:
                text = text.replace(part, f"${name}").replace(repr(part)[1:-1], f"${name}")
    text = _SHAPE.sub("…", text)
    return _BEARER.sub(r"\1…", _FIELD.sub(r"\1…", _LOGIN.sub(lambda match: f"{match[1] or '://'}…@", text)))


def legible(text: str) -> str:
    """`text` for a message: `clean`, and only the two ends of a very long one."""
    size = len(text)
    text = clean(text if size <= 2 * _NEAR else text[:_NEAR] + text[-_NEAR:])
    text = _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
    return text if size <= _LONGEST else f"{text[:_END]} … ({size} characters) … {text[-_END:]}"


def did_you_mean(typo: str, names: Iterable[str]) -> str:
    """The word of `names` most similar to `typo`; empty if none is similar."""
    close = difflib.get_close_matches(typo, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def in_words(seconds: float) -> str:
    """A time: "3 min 20 s", or "20 s" below a minute."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def typed(value: object, text: Callable[[str], str] = str) -> str:
    """A value as written on a command line. text: how a text is written."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(typed(member, text) for member in value)}]"
    if isinstance(value, Mapping):
        return "{}"
    return str(value) if isinstance(value, int | float) else text(str(value))


def quoted(text: str) -> str:
    """`text` as the value of an option that a command reads as exactly this text, whatever is in it."""
    if _BARE.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # otherwise OmegaConf looks for another option there
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)\Z", r"\1\1", text)
    return f"'{text}'"


def option(key: str, value: object) -> str:
    """The word of a command line, to be quoted for a shell, that gives `key` exactly this value."""
    return f"{key}={typed(value, quoted)}"


def in_shell(word: str) -> str:
    """A word as a shell reads it; one with single quotes in double ones, where that is enough."""
    return f'"{word}"' if "'" in word and not set('"$`\\!\n') & set(word) else shlex.quote(word)


class Shown(str):
    """A name in a page: {name:option} the value of an option in a shell, {name:shell} a word of one, {name:json} a
    literal of JSON or Python, also between single quotes."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec == "json":
            return json.dumps(self, ensure_ascii=False).replace("'", "\\u0027")
        return in_shell(quoted(self)) if spec == "option" else shlex.quote(self) if spec == "shell" else str(self)


def listed(words: Sequence[str], limit: int = 6) -> str:
    """The first few of `words`, and the number of the others."""
    return ", ".join(words[:limit]) + (f" and {len(words) - limit} more" if len(words) > limit else "")


@dataclass(frozen=True)
class Table:
    """A table. columns: a description by column name, "" if the name is enough; rows: one text per column."""

    columns: Mapping[str, str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """The table as lines of Markdown."""
        rows = ["".join(f" {cell} |" if cell else " |" for cell in row) for row in (list(self.columns), *self.rows)]
        return [f"|{rows[0]}", "|" + "---|" * len(self.columns), *(f"|{row}" for row in rows[1:])]


class _Figures(string.Formatter):
    """Fills the templates of columns; a missing fact gives an empty text."""

    def get_field(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(name, args, kwargs)
        except (AttributeError, KeyError, IndexError, TypeError):
            return "", name

    def format_field(self, value: Any, form: str) -> str:
        return figure(value, form)


def figure(value: object, form: str = "interval") -> str:
    """A figure as text; a dash for None. A text stays. form: of `format`, with "?" appended if zero is a dash too."""
    if isinstance(value, str):
        return value
    if value is None or (form.endswith("?") and not value):
        return "–"
    return format(value, form.removesuffix("?"))


def filled(columns: Columns, facts: Iterable[Mapping[str, object]]) -> Table:
    """The table with a row for each of `facts`."""
    rows = [[_Figures().vformat(cell, (), record) for cell, _ in columns.values()] for record in facts]
    return Table({name: meaning for name, (_, meaning) in columns.items()}, rows)

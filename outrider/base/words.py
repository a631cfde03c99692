"""Texts for people.

messages       `make_legible`: without secrets and control characters, and not too long
options        `write_option`: KEY=VALUE, which Hydra, the reader of command lines and YAML files, reads back as exactly
               this value; `quote_word`: a word for a shell
names          `did_you_mean`: the name that a misspelt one is most like
tables         `fill_table`: a template for each column, filled for each row

Example: `fill_table({"τ": ("{tau:.2f}", "tokens of a pass")}, [{"tau": 2.138}, {}])` has the rows ["2.14"] and [""].

`outrider.base.errors` loads this module with the first error, since nothing that decodes needs it.
"""

import difflib
import json
import os
import re
import shlex
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.base.errors import UserError

Columns = Mapping[str, tuple[str, str]]  # by the title of a column: the template of its cells, and its meaning
_UNQUOTED = re.compile(r"(?!\.\d|(?i:null|true|false|nan|inf)$)[A-Za-z_/.][\w/.*-]*", re.ASCII)  # read as texts
_LONGEST, _END = 4000, 1000  # characters of a message; characters at each end that are shown of a longer message
_SEARCHED = 2**16  # characters at each end of a text that are searched for secrets; the others are never shown
_SHORTEST_SECRET = 6  # characters: a shorter value of a variable that is named like a key is a switch
SECRET_NAME = re.compile(r"(?i)(key|token|secret|pass|password|passwd|credentials?|_pat)_?\d*$")
# USER:PASSWORD@ of a URL. A password in a quoted URL may have spaces; in other text it has none. It may have slashes,
# unless a port stands before the slash.
_LOGIN = re.compile(r"(['\"=][a-z][a-z0-9+.-]*://)[^'\"]{0,256}@|://(?:[^\s/]*|[^\s/:]*:(?!\d+[/?#])\S{0,256})@")
# NAME=VALUE of a URL or a text, or "NAME": VALUE, where the name is that of a secret; group 1 is all before the value.
_FIELD = re.compile(
    r"(?i)((?:[?&][\w.-]{0,64}(?:key|token|sig|signature|auth)|"
    r"\b[\w.-]{0,64}(?:hf_token|access_token|api_?key|secret|password|passwd))(?:=|['\"]: ?)['\"]?)[^&\s'\"]+"
)
_KEY = re.compile(r"\b(?:hf_|sk-(?:\w+-)?|gh[pousr]_)[A-Za-z0-9]{20,}")  # a key without a name beside it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters of terminals
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s'\",]+")


def read_secret(env_var: str) -> str | None:
    """The key in the environment variable `env_var`, None without one. Raises `UserError` if no header can hold it."""
    key = os.environ.get(env_var) or None
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"{env_var}: the key in it has a line break or another character that no key has; set it again")
    return key


def remove_secrets(text: str) -> str:
    """`text` without secrets: values of variables that are named like keys, logins and keys in URLs, bearers' keys."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name):
            text = _replace_value(text, value, f"${name}")
    text = _LOGIN.sub(lambda match: f"{match[1] or '://'}…@", _KEY.sub("…", text))
    return _BEARER.sub(r"\1…", _FIELD.sub(r"\1…", text))


def _replace_value(text: str, secret: str, label: str) -> str:
    """`text` with `label` for each printable part of `secret`, as the other characters may be escaped in `text`."""
    for secret_part in re.split(r"[^ -~]+", secret):
        if len(secret_part) >= _SHORTEST_SECRET:
            text = text.replace(secret_part, label).replace(repr(secret_part)[1:-1], label)
    return text


def make_legible(text: str) -> str:
    """`text` as a message shows it: without secrets, control characters escaped, and of a long text the two ends."""
    length = len(text)
    text = remove_secrets(text if length <= 2 * _SEARCHED else text[:_SEARCHED] + text[-_SEARCHED:])
    text = escape_controls(text)
    return text if length <= _LONGEST else f"{text[:_END]} … ({length} characters) … {text[-_END:]}"


def escape_controls(text: str) -> str:
    """`text` without control characters, which terminals obey: as Python writes them."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def did_you_mean(typo: str, names: Iterable[str]) -> str:
    """A hint for an error: the name that `typo` is most similar to; empty if it is similar to none."""
    close_matches = difflib.get_close_matches(typo, names, n=1)
    return f"; did you mean {close_matches[0]!r}?" if close_matches else ""


def format_seconds(seconds: float) -> str:
    """A duration in words: "3 min 20 s", or "20 s" below a minute."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def format_value(value: object, format_text: Callable[[str], str] = str) -> str:
    """A value as on a command line: null, true, 0.5, [a,b], {}; `format_text` writes the texts in it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{}"  # an empty one: defaults of options are, and `write_words` writes others key by key
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(format_value(member, format_text) for member in value)}]"
    return str(value) if isinstance(value, int | float) else format_text(str(value))


def quote_value(text: str) -> str:
    """`text` as the value of an option, which Hydra reads as exactly this text whatever characters it has."""
    if _UNQUOTED.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # otherwise OmegaConf looks for another option there
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)\Z", r"\1\1", text)
    return f"'{text}'"


def write_option(key: str, value: object) -> str:
    """KEY=VALUE, a word that gives `key` exactly this value; a shell needs it quoted (`quote_word`)."""
    return f"{key}={format_value(value, quote_value)}"


def quote_word(word: str) -> str:
    """`word` as a shell reads it back; a word with single quotes stands in double quotes where they are enough."""
    return f'"{word}"' if "'" in word and not set('"$`\\!\n') & set(word) else shlex.quote(word)


class PageName(str):
    """A name for a template: {name:option} is an option's value in a shell, {name:shell} a word in a shell, {name:json}
    a literal of JSON and Python, also between single quotes."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        match spec:
            case "json":
                return json.dumps(self, ensure_ascii=False).replace("'", "\\u0027")
            case "option":
                return quote_word(quote_value(self))
            case "shell":
                return shlex.quote(self)
        return str(self)


def list_words(words: Sequence[str], limit: int = 6) -> str:
    """The first `limit` of `words`, and the number of the others: "a, b and 7 more"."""
    return ", ".join(words[:limit]) + (f" and {len(words) - limit} more" if len(words) > limit else "")


@dataclass(frozen=True)
class Table:
    """A table of texts. columns: by title, the column's meaning, "" if the title is enough. rows: a text per column."""

    columns: Mapping[str, str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        lines = ["".join(f" {cell} |" if cell else " |" for cell in row) for row in (list(self.columns), *self.rows)]
        return [f"|{lines[0]}", "|" + "---|" * len(self.columns), *(f"|{row}" for row in lines[1:])]


class _CellFormatter(string.Formatter):
    """`str.format` for a cell: values are formatted by `format_figure`, and a missing value gives an empty text."""

    def get_field(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        try:
            return super().get_field(name, args, kwargs)
        except (AttributeError, KeyError, IndexError, TypeError):
            return "", name

    def format_field(self, value: object, format_spec: str) -> str:
        return format_figure(value, format_spec)


def format_figure(value: object, format_spec: str = "interval") -> str:
    """A figure as text. None is a dash, and a text stays as it is.

    format_spec: as of `format`; with "?" appended, zero is a dash too. "interval": for values that define this format.
    """
    if isinstance(value, str):
        return value
    if value is None or (format_spec.endswith("?") and not value):
        return "–"
    return format(value, format_spec.removesuffix("?"))


def fill_table(columns: Columns, records: Iterable[Mapping[str, object]]) -> Table:
    """The table with a row for each of `records`, whose values fill the templates of `columns` by name."""
    rows = [[_CellFormatter().vformat(template, (), record) for template, _ in columns.values()] for record in records]
    return Table({title: meaning for title, (_, meaning) in columns.items()}, rows)

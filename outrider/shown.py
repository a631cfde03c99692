"""What messages and records show of texts and values: no secret, and of a long one its two ends.

It stands apart from `outrider.errors`, which loads it with the first error: nothing of it is needed to decode.
"""

import os
import re

from outrider.errors import UserError

_LONGEST, _END = 4000, 1000  # characters of a message, and of each end of a longer one
_NEAR = 2**16  # characters at each end of a text that are looked at: the others are not shown
_FEWEST = 6  # characters of a secret: shorter values of such variables are switches
SECRET_NAME = re.compile(r"(?i)(key|token|secret|pass|password|passwd|credentials?|_pat)_?\d*$")
# In a URL of its own a password may have spaces, in a text it has none; it may have slashes, unless a port is before.
_LOGIN = re.compile(r"(['\"=][a-z][a-z0-9+.-]*://)[^'\"]{0,256}@|://(?:[^\s/]*|[^\s/:]*:(?!\d+[/?#])\S{0,256})@")
_FIELD = re.compile(
    r"(?i)((?:[?&][\w.-]{0,64}(?:key|token|sig|signature|auth)|"
    r"\b[\w.-]{0,64}(?:hf_token|access_token|api_?key|secret|password|passwd))(?:=|['\"]: ?)['\"]?)[^&\s'\"]+"
)
_SHAPE = re.compile(r"\b(?:hf_|sk-(?:\w+-)?|gh[pousr]_)[A-Za-z0-9]{20,}")  # a key without a name beside it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal would obey
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s'\",]+")


def secret(name: str) -> str | None:
    """The key in the environment variable `name`, None without one. Raises `UserError` for one that no header holds."""
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
    return _BEARER.sub(r"\1…", _FIELD.sub(r"\1…", _LOGIN.sub(lambda found: f"{found[1] or '://'}…@", text)))


def shown(text: str) -> str:
    """`text` as a message may have it: `clean`, and of a very long one the two ends."""
    size = len(text)
    text = clean(text if size <= 2 * _NEAR else text[:_NEAR] + text[-_NEAR:])
    text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
    return text if size <= _LONGEST else f"{text[:_END]} … ({size} characters) … {text[-_END:]}"

"""What a prompt of the Python API may be: a text, a conversation, or token ids."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from outrider.base.errors import UserError, require
from outrider.base.words import did_you_mean

# {"role": "system" | "user" | "assistant", "content": text}; the last is a user's. An answer may have its "ids".
Messages = Sequence[Mapping[str, object]]
Asked = str | Messages | Sequence[int]  # a text, a conversation, or token ids
_FIELDS = ("role", "content")
_ROLES = ("system", "user", "assistant")
_PROMPT = "one text, one conversation (a list of messages {'role': …, 'content': …}), or one list of token ids"


def are_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Whether `prompt` is a list of token ids."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(item) is int for item in prompt)


def are_several(prompt: object) -> bool:
    """Whether `prompt` is a list of prompts."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(item, Sequence) for item in prompt)


def conversation(prompt: object, key: str) -> Messages:
    """`prompt` as messages, the last of them the user's. Raises `UserError` naming `key` for anything else."""
    items = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) else []
    if not items or not all(isinstance(item, Mapping) for item in items):
        remedy = "; stream a prompt at a time: only generate takes a list of them" if are_several(prompt) else ""
        raise UserError(f"{key}={reprlib.repr(prompt)}: expected {_PROMPT}{remedy}")
    for place, message in enumerate(items):
        whole = all(isinstance(message.get(field), str) for field in _FIELDS)
        hint = next(filter(None, (did_you_mean(str(name), _FIELDS) for name in message if name not in _FIELDS)), "")
        require(whole, f"{key}[{place}]", message, f"a text as its 'role' and one as its 'content'{hint}")
        require(are_ids(message.get("ids", [0])), f"{key}[{place}]['ids']", message.get("ids"), "token ids")
        role = str(message["role"])
        expected = f"one of {', '.join(_ROLES)}{did_you_mean(role, _ROLES)}"
        require(role in _ROLES, f"{key}[{place}]['role']", role, expected)
    require(items[-1]["role"] == "user", f"{key}[-1]['role']", items[-1]["role"], "user: the last message asks")
    return items

"""Arguments of the Python API: prompts, as a text, a conversation or token ids, and known options."""

import functools
import inspect
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, ParamSpec, TypeGuard, TypeVar

from outrider.base.errors import UserError, require
from outrider.base.settings import Named
from outrider.base.words import did_you_mean
from outrider.inference.settings.sampling import SamplingConfig

_Parameters = ParamSpec("_Parameters")
_Return = TypeVar("_Return")
TextArgument = Annotated[str, Named("a text")]
# {"role": "system" | "user" | "assistant", "content": text}; the last is a user's. An answer may have its "ids".
Messages = Sequence[Mapping[str, object]]
PromptInput = str | Messages | Sequence[int]  # a text, a conversation, or token ids
_FIELDS = ("role", "content")
_ROLES = ("system", "user", "assistant")
_PROMPT = "one text, one conversation (a list of messages {'role': …, 'content': …}), or one list of token ids"


def is_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(item) is int for item in prompt)


def is_prompt_list(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(item, Sequence) for item in prompt)


def require_conversation(prompt: object, key: str) -> Messages:
    """`prompt` as messages, the last of them the user's. Raises `UserError` naming `key` for anything else."""
    items = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) else []
    if not items or not all(isinstance(item, Mapping) for item in items):
        remedy = "; stream a prompt at a time: only generate takes a list of them" if is_prompt_list(prompt) else ""
        raise UserError(f"{key}={reprlib.repr(prompt)}: expected {_PROMPT}{remedy}")
    for index, message in enumerate(items):
        has_texts = all(isinstance(message.get(field), str) for field in _FIELDS)
        hint = next(filter(None, (did_you_mean(str(name), _FIELDS) for name in message if name not in _FIELDS)), "")
        require(has_texts, f"{key}[{index}]", message, f"a text as its 'role' and one as its 'content'{hint}")
        require(is_token_ids(message.get("ids", [0])), f"{key}[{index}]['ids']", message.get("ids"), "token ids")
        role = str(message["role"])
        expected = f"one of {', '.join(_ROLES)}{did_you_mean(role, _ROLES)}"
        require(role in _ROLES, f"{key}[{index}]['role']", role, expected)
    require(items[-1]["role"] == "user", f"{key}[-1]['role']", items[-1]["role"], "user: the last message asks")
    return items


def sampling_of(
    do_sample: bool, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float | None
) -> SamplingConfig:
    """The settings of sampling that the options say. Raises `UserError` for options that contradict each other."""
    if do_sample:
        sampling = SamplingConfig(temperature, top_k, top_p, min_p, repetition_penalty)
        require(temperature > 0, "temperature", temperature, "a number > 0; for greedy text do_sample=False")
        return sampling
    for key, setting, default in (("temperature", temperature, 1.0), ("top_k", top_k, 0), ("top_p", top_p, 1.0),
                                ("min_p", min_p, 0.0)):  # fmt: skip
        require(setting == default, key, setting, f"{default} unless do_sample=True: nothing is sampled")
    return SamplingConfig(repetition_penalty=repetition_penalty)


def refuse_unknown_options(call: Callable[_Parameters, _Return]) -> Callable[_Parameters, _Return]:
    """`call`, which raises `UserError` for unknown options."""

    @functools.wraps(call)
    def checked(*args: _Parameters.args, **options: _Parameters.kwargs) -> _Return:
        require_known_options(call.__name__, options, option_names(call))
        return call(*args, **options)

    return checked


def option_names(call: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in ("self", "cls")]


def require_known_options(call: str, options: Collection[str], names: Sequence[str]) -> None:
    """Raise `UserError` for the first of the `options` of `call` that is not in `names`."""
    for name in options:
        if name not in names:
            hint = did_you_mean(name, names)
            raise UserError(f"{call}({name}=…): no such option{hint or '; there are ' + ', '.join(names)}")

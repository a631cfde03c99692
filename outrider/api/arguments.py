"""Checks of the Python API's arguments: prompts (a text, a conversation or token ids), sampling, known options.

`require` raises a `UserError` that names the argument, its value and what was expected. A `TargetSetup` has the
tokenizer, config and chat template of the target, without its weights.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeGuard, TypeVar, cast

from outrider.base.errors import UserError, require
from outrider.base.settings import Named
from outrider.base.words import did_you_mean
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.messages import Message
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments
from outrider.inference.settings.sampling import SamplingConfig

if TYPE_CHECKING:
    from outrider.inference.loading.target_setup import TargetSetup

_Parameters = ParamSpec("_Parameters")
_Return = TypeVar("_Return")
TextArgument = Annotated[str, Named("a text")]
# {"role": "system" | "user" | "assistant", "content": text}; the last is a user's. An answer may have the token "ids"
# that it was written with.
Messages = Sequence[Mapping[str, object]]
PromptInput = str | Messages | Sequence[int]  # a text, a conversation, or token ids
_FIELDS = ("role", "content")
_ROLES = ("system", "user", "assistant")
_PROMPT = "one text, one conversation (a list of messages {'role': …, 'content': …}), or one list of token ids"


def is_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:  # a bool, which is an int, is no id
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(item) is int for item in prompt)


def is_prompt_list(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(item, Sequence) for item in prompt)


def require_conversation(prompt: object, key: str) -> Messages:
    """`prompt` as messages, the last of them the user's. Raises `UserError` naming `key` for anything else."""
    turns = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) else []
    if not turns or not all(isinstance(item, Mapping) for item in turns):
        remedy = "; stream a prompt at a time: only generate takes a list of them" if is_prompt_list(prompt) else ""
        raise UserError(f"{key}={reprlib.repr(prompt)}: expected {_PROMPT}{remedy}")
    for index, message in enumerate(turns):
        has_texts = all(isinstance(message.get(field), str) for field in _FIELDS)
        hint = next(filter(None, (did_you_mean(str(name), _FIELDS) for name in message if name not in _FIELDS)), "")
        require(has_texts, f"{key}[{index}]", message, f"a text as its 'role' and one as its 'content'{hint}")
        require(is_token_ids(message.get("ids", [0])), f"{key}[{index}]['ids']", message.get("ids"), "token ids")
        role = str(message["role"])
        expected = f"one of {', '.join(_ROLES)}{did_you_mean(role, _ROLES)}"
        require(role in _ROLES, f"{key}[{index}]['role']", role, expected)
    require(turns[-1]["role"] == "user", f"{key}[-1]['role']", turns[-1]["role"], "user: the last message asks")
    return turns


def read_prompt(
    setup: "TargetSetup", prompt: PromptInput, key: str, template_arguments: Mapping[str, object]
) -> list[int]:
    """The token ids of one prompt; perhaps not all if they exceed the context. Raises `UserError` naming `key`.

    template_arguments: what the chat template reads besides the messages (`KWARGS` is the option's name).
    """
    is_conversation = not isinstance(prompt, str) and not is_token_ids(prompt)
    expected = "none: only a conversation is rendered by a template"
    require(is_conversation or not template_arguments, KWARGS, template_arguments, expected)
    if is_token_ids(prompt):
        size = setup.config.vocab_size
        for index, token in enumerate(prompt):
            require(0 <= token < size, f"{key}[{index}]", token, f"a token id of the target: 0 to {size - 1}")
        return [*prompt]
    if isinstance(prompt, str):
        ids = render_prompt([prompt], setup.tokenizer, template="none", context=context_limit(setup.config), where=key)
    else:
        ids = _render(setup, require_conversation(prompt, key), key, template_arguments)
    require(bool(ids), key, prompt, "at least one token to continue from: an empty prompt has none")
    return ids


def _render(setup: "TargetSetup", messages: Messages, key: str, template_arguments: Mapping[str, object]) -> list[int]:
    """The ids of a conversation, rendered by the chat template; its answers may have their own ids."""
    recorded_ids = [message.get("ids") for message in messages if message["role"] == "assistant"]
    answer_ids = [read_prompt(setup, ids, f"{key}: ids", {}) if is_token_ids(ids) else [] for ids in recorded_ids]
    tokenizer = bind_arguments(setup.target.tokenizer, {**setup.arguments, **template_arguments}, setup.chat_template)
    turns, context_size = cast("list[Message]", messages), context_limit(setup.config)
    return render_prompt(turns, tokenizer, setup.chat_template, answer_ids=answer_ids, context=context_size, where=key)


def sampling_of(
    do_sample: bool, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float | None
) -> SamplingConfig:
    """The settings of sampling from the options. Raises `UserError` for options that contradict each other."""
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
    def call_with_known_options(*args: _Parameters.args, **options: _Parameters.kwargs) -> _Return:
        require_known_options(call.__name__, options, option_names(call))
        return call(*args, **options)

    return call_with_known_options


def option_names(call: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in ("self", "cls")]


def require_known_options(call: str, options: Collection[str], names: Sequence[str]) -> None:
    """Raise `UserError` for the first of the `options` of `call` that is not in `names`."""
    for name in options:
        if name not in names:
            hint = did_you_mean(name, names)
            raise UserError(f"{call}({name}=…): no such option{hint or '; there are ' + ', '.join(names)}")

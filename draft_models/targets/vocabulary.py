"""What this toolkit needs of a tokenizer besides encoding.

Digests identify its vocabulary (`vocabulary_digest`) and everything that decides ids (`tokenizer_digest`). `limit_rows`
and `require_rows` refuse ids for which the model's embedding has no row. A chat template reads arguments by name
besides the messages (`bind_arguments`), and maybe a clock, which stands still during a run (`clock_of`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import Environment, TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.meta import find_undeclared_variables

from outrider.base.errors import UserError, require
from outrider.base.run_dirs import run_time
from outrider.base.words import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KWARGS = "chat_template_kwargs"  # the option with the arguments of a chat template
_JINJA = Environment(extensions=["jinja2.ext.loopcontrols"])
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # a tag that only transformers knows
# The variables that transformers gives to every template.
_PROVIDED = {*DEFAULT_NAMESPACE, "messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
_DIRECTIVE = re.compile(r"(?<!\{)%[-_0^#]?[A-Za-z]")  # of strftime
# A macro that replaces the directives of a time format by their values; it refuses a format with further directives.
# "\ue001" stands for "%%", a percent sign of the text, meanwhile.
_CLOCK = """{%% macro strftime_now(format) %%}{%% set text = format.replace("%%%%", "\ue001")%s %%}\
{{ raise_exception("its clock shows what is not known") if "%%" in text else text.replace("\ue001", "%%") }}\
{%% endmacro %%}
"""  # transformers leaves out a line break after a tag
_ROWS_ATTR = "embedding_rows"  # an attribute set on a tokenizer: the number of ids that its model can read


class UnusableTextError(UserError):
    """A text that a model cannot read. Reading a data set skips it, and counts it under `reason`."""

    def __init__(self, message: str, reason: str = "template") -> None:
        super().__init__(message)
        self.reason = reason


def vocabulary_digest(vocab: Mapping[str, int]) -> str:
    """sha256 over the pieces by id in `tokenizer.get_vocab()`: equal if and only if the ids mean the same. A
    SentencePiece model and the Hugging Face tokenizer made from it agree."""
    pieces_by_id = sorted((token_id, piece) for piece, token_id in vocab.items())
    return hashlib.sha256(json.dumps(pieces_by_id).encode()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over everything that determines the ids of plain text: vocabulary, merges and rules, special tokens."""
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend.pop("truncation", None)  # set by the last call, not a property of the tokenizer
        backend.pop("padding", None)
    else:
        backend = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    digest_inputs = [backend, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(digest_inputs, sort_keys=True, default=str).encode()).hexdigest()


def limit_rows(tokenizer: PreTrainedTokenizerBase, row_count: int) -> PreTrainedTokenizerBase:
    """`tokenizer`, for an embedding of `row_count` rows. No text may contain tokens without a row: fine-tuning often
    adds such a padding token. Raises `UserError` if a token without a row begins or ends every text."""
    setattr(tokenizer, _ROWS_ATTR, row_count)
    end_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    require_rows([*tokenizer("a text")["input_ids"], *end_ids], tokenizer, f"{tokenizer.name_or_path}: any text")
    return tokenizer


def rows_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The number of rows of the embedding that `tokenizer` is for; None: not known."""
    return getattr(tokenizer, _ROWS_ATTR, None)


def require_rows(ids: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise `UnusableTextError`, naming `where`, for an id without a row in the embedding."""
    row_count, largest_id = rows_of(tokenizer), int(np.max(ids, initial=-1))
    if row_count is not None and largest_id >= row_count:
        token = tokenizer.convert_ids_to_tokens(largest_id)
        fault = f"holds the token {token!r} (id {largest_id}), and the model's embedding has {row_count} rows"
        remedy = "leave it out of the text, or give a model whose embedding was resized for it"
        raise UnusableTextError(f"{where} {fault}; {remedy}", reason="token")


def bind_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object], template: str = "auto", option: str = KWARGS
) -> PreTrainedTokenizerBase:
    """A copy of `tokenizer` whose chat template begins by setting `arguments`; the tokenizer itself without arguments.

    template: what renders chats: the tokenizer's chat template for "auto" or "tokenizer", else a built-in template.
    Raises `UserError`, naming `option`, for an argument that the template does not read.
    """
    if not arguments:
        return tokenizer
    text = tokenizer.chat_template if template in ("auto", "tokenizer") else None
    template_texts = text if isinstance(text, dict) else {"": text or ""}  # a model may have several, by name
    try:
        syntax_trees = [_JINJA.parse(_GENERATION.sub("", source)) for source in template_texts.values()]
        variables = sorted(set[str]().union(*map(find_undeclared_variables, syntax_trees)) - _PROVIDED)
    except (TemplateError, RecursionError) as error:
        raise UserError(f"{option}: the chat template cannot be read ({error}); leave it out") from None
    for name, value in arguments.items():
        expected = f"{', '.join(variables) or 'none'}, which the chat template reads{did_you_mean(name, variables)}"
        require(name in variables, f"{option}.{name}", value, expected)
        is_json = value == json.loads(json.dumps(value, default=str), parse_constant=str)  # others become texts
        require(is_json, f"{option}.{name}", value, "what JSON has: texts, numbers, true, false, null, lists, objects")
    set_statements = "".join(f"{{% set {name} = {value!a} %}}\n" for name, value in sorted(arguments.items()))
    bound, templates = copy(tokenizer), {name: set_statements + source for name, source in template_texts.items()}
    bound.chat_template = templates if text is template_texts else templates[""]
    return bound


def clock_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """What is put before a chat template that reads a clock, so that the clock shows the time of this run. "" outside a
    run, and for a template that reads no clock."""
    template_text = str(tokenizer.chat_template)
    if "strftime_now" not in template_text or (time := run_time()) is None:
        return ""
    directives = sorted({*_DIRECTIVE.findall(template_text)})
    return _CLOCK % "".join(f".replace({directive!a}, {time.strftime(directive)!a})" for directive in directives)

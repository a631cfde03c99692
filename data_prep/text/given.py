"""Early checks of a command's inputs, before its work begins: target, tokenizer, one record and one prompt."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from data_prep.text.chat import render_prompt
from data_prep.text.documents import encode
from data_prep.text.prompts import read_prompts
from data_prep.text.records import Counts
from data_prep.text.settings import DataConfig
from data_prep.text.sources import read_records
from draft_models.targets.encoder import open_encoder
from outrider.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DRAFTERS = ("checkpoint", "small_lm", "eagle3")  # whose training records may name the prompts' template


def read_some(config: Any, wanted: Callable[[str], bool]) -> "PreTrainedConfig | None":
    """The config of the target in a command's settings; None if they have no target, or it is not wanted.

    Also reads the target's tokenizer, and one record of the data and of the prompts, rendered as the command would.
    wanted: whether to check the option with this dotted key. Raises `UserError` for unusable inputs.
    """
    target, tokenizer = None, None
    if getattr(config, "target", None) not in (None, "replay") and wanted("target"):
        from draft_models.targets.open_target import open_target  # torch, which not every command needs

        target = open_target(config.target, config.revision, by_layers=getattr(config, "by_layers", False))
        tokenizer = target.tokenizer
    named = getattr(config, "tokenizer", None)
    if named is not None and wanted("tokenizer"):
        open_encoder(named, config.revision)
    for key, data in _sources(config):
        if wanted(f"{key}.path"):
            _read_record(key, data, tokenizer, asking=getattr(config, "asks", False))
        elif tokenizer is not None and data.layout not in ("auto", "text", "code"):  # conversations, not written yet
            render_prompt(("a question",), tokenizer, data.template, f"{key}.template")
    prompts = getattr(config, "prompts", None)  # a number in the settings of calibrate
    if isinstance(prompts, str) and prompts != "python_stdlib" and wanted("prompts"):
        _read_prompt(config, tokenizer)
    return None if target is None else target.config


def _sources(config: Any) -> Iterator[tuple[str, DataConfig]]:
    """(key, data) of each source to read."""
    data = getattr(config, "data", None)
    if data is not None:
        parts = [(f"data.mix.{name}", part) for name, _, part in data.parts()]
        yield from parts or [("data", data)]


def _read_record(key: str, data: DataConfig, tokenizer: "PreTrainedTokenizerBase | None", *, asking: bool) -> None:
    counts = Counts()
    both = (read_records(data, split, counts, asking=asking) for split in ("train", "heldout"))
    for record in chain.from_iterable(both):
        with counts.refusing():
            if tokenizer is None:
                return
            if "messages" in record:
                users = [place for place, message in enumerate(record["messages"]) if message["role"] == "user"]
                first = record["messages"][: users[0] + 1] if users else ("a question",)
                render_prompt(first, tokenizer, data.template, f"{key}.template", where=record["id"])
            if not asking:
                encode([record], tokenizer, data.template)
            return
    raise UserError(f"{key}: no usable record in path={list(data.path)}; the first: {counts.first or 'none'}")


def _read_prompt(config: Any, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    (prompt,) = read_prompts(config.prompts, limit=1)
    by_record = config.template == "auto" and any(getattr(config, key) for key in DRAFTERS)
    if tokenizer is not None and prompt.chat and (tokenizer.chat_template or not by_record):
        render_prompt(prompt.turns[:1], tokenizer, config.template)

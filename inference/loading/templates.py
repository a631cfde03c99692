"""The template of chat prompts: by default the one of the drafters' training data."""

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.settings import construct
from outrider.data_prep.text.settings import ChatTemplate, DataConfig, PromptTemplate
from outrider.inference.settings.evaluate import EvaluateConfig

_PLAIN = ("text", "code")  # layouts without conversations


def trained_templates(config: EvaluateConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, frozenset[ChatTemplate]]:
    """The recorded chat templates of each drafter's training data, by kind of drafter.

    Kinds without such a record are left out. Raises `UserError` for an unreadable record.
    """
    found = {name: templates_of(one.data, tokenizer) for name, one in config.trained().items()}
    return {name: templates for name, templates in found.items() if templates}


def templates_of(data: Mapping[str, object] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[ChatTemplate]:
    """The templates that rendered conversations in a training with the recorded settings `data`; empty if unknown, or
    if it had no conversations.

    template=tokenizer is recorded for plain text too, so it means nothing if the tokenizer has no chat template.
    """
    if data is None or "template" not in data:
        return frozenset()
    try:
        config: DataConfig = construct(DataConfig, data)
    except UserError:
        return frozenset()
    parts = [part for _, _, part in config.parts()] or [config]
    talk = [part for part in parts if part.source != "python_stdlib" and part.layout not in _PLAIN]
    return frozenset(part.template for part in talk if part.template != "tokenizer" or tokenizer.chat_template)


def chat_template(asked: PromptTemplate, trained: Mapping[str, frozenset[ChatTemplate]]) -> PromptTemplate:
    """The template of chat prompts: `asked`, or for auto the template of the drafters' training.

    It remains auto if none is recorded. Raises `UserError` if the drafters differ, or if `asked` is another template
    than one of them was trained with. template=none means bare text and is never refused.
    """
    said = ", ".join(f"{kind} by {' and '.join(sorted(own))}" for kind, own in trained.items())
    known = sorted(frozenset[ChatTemplate]().union(*trained.values()))
    if asked == "auto":
        if len(known) > 1:
            raise UserError(f"template=auto: the training's conversations were rendered for {said}; give template=")
        return known[0] if known else "auto"
    for kind, own in trained.items():
        if asked != "none" and asked not in own:
            raise UserError(
                f"template={asked}: expected {' or '.join(sorted(own))}, by which the conversations were rendered that "
                f"the {kind} drafter was trained on; leave template= out, or give template=none for bare text"
            )
    return asked

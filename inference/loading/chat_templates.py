"""The template of chat prompts: by default the one by which the drafters' training data was rendered."""

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.settings import construct
from outrider.data_prep.text.settings import ChatTemplate, DataConfig, PromptTemplate

_PLAIN = ("text", "code")  # layouts without conversations


def templates_of(data: Mapping[str, object] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[ChatTemplate]:
    """The templates of the conversations in the recorded settings `data` of a training (see `conversations_in`)."""
    return frozenset(source.template for source in conversations_in(data, tokenizer))


def conversations_in(data: Mapping[str, object] | None, tokenizer: PreTrainedTokenizerBase) -> list[DataConfig]:
    """The `sources_in` that have conversations. template=tokenizer is recorded for plain text too, so it means nothing
    if the tokenizer has no chat template."""
    return [source for source in sources_in(data) if source.template != "tokenizer" or tokenizer.chat_template]


def sources_in(data: Mapping[str, object] | None) -> list[DataConfig]:
    """The sources in the recorded settings `data` of a training that are no plain text; none if they are unknown."""
    if data is None or "template" not in data:
        return []
    try:
        config: DataConfig = construct(DataConfig, data)
    except UserError:  # not readable, so unknown
        return []
    sources = [source for _, _, source in config.parts()] or [config]  # of a mix, or the only one
    return [source for source in sources if source.source != "python_stdlib" and source.layout not in _PLAIN]


def chat_template(template: PromptTemplate, trained_templates: Mapping[str, frozenset[ChatTemplate]]) -> PromptTemplate:
    """The template of chat prompts: `template`, or for auto the template of the drafters' training.

    trained_templates: by kind of drafter. auto remains if none is recorded. Raises `UserError` if the drafters differ,
    or if one was trained with another template than `template`. template=none means bare text and is never refused.
    """
    summary = ", ".join(f"{kind} by {' and '.join(sorted(names))}" for kind, names in trained_templates.items())
    templates = sorted(frozenset[ChatTemplate]().union(*trained_templates.values()))
    if template == "auto":
        if len(templates) > 1:
            raise UserError(f"template=auto: the training's conversations were rendered for {summary}; give template=")
        return templates[0] if templates else "auto"
    for kind, names in trained_templates.items():
        if template != "none" and template not in names:
            raise UserError(
                f"template={template}: expected {' or '.join(sorted(names))}, by which the conversations were rendered "
                f"that the {kind} drafter was trained on; leave template= out, or give template=none for bare text"
            )
    return template

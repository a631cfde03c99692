"""By what chat prompts are rendered: as the drafters' training rendered conversations, unless it is said otherwise."""

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from data_prep.text.settings import ChatTemplate, DataConfig, PromptTemplate
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS
from outrider.errors import UserError
from outrider.settings import construct

_PLAIN = ("text", "code")  # layouts without conversations


def trained_templates(config: EvaluateConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, frozenset[ChatTemplate]]:
    """The templates of the conversations that each drafter of `config` was trained on, by its kind, as it is recorded.

    Kinds without such a record are left out. Raises `UserError` where a record cannot be read.
    """
    places = {kind.name: where for kind in KINDS.values() if (where := config.where(kind)) is not None}
    found = {name: templates_of(config.maker(KINDS[name]).data_of(where), tokenizer) for name, where in places.items()}
    return {name: templates for name, templates in found.items() if templates}


def templates_of(data: Mapping[str, object] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[ChatTemplate]:
    """By what conversations were rendered in a training with the recorded settings `data`; empty where there is no
    telling, or there cannot have been any.

    template=tokenizer is what text has on record too. So it tells nothing of a tokenizer without a chat template.
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
    """What renders chat prompts: `asked`, and with auto the template that the drafters were trained with.

    auto remains where none of them says one. Raises `UserError` where the drafters differ, and where another template
    is asked for than one of them knows. template=none is a text without any, and is never refused.
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

"""The answers to audit, as a file has them: a prompt, what was said after it, and how its tokens were chosen."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from data_prep.text.chat import ids_within, render_prompt
from data_prep.text.sources import read_file
from draft_models.targets.model_spec import context_limit
from draft_models.targets.open_target import OpenTarget
from inference.settings.sampling import SamplingConfig
from outrider.errors import UserError, require
from outrider.settings import construct


@dataclass(frozen=True)
class ServedAnswer(SamplingConfig):
    """A line: an answer, and how its tokens were chosen. What has texts and no ids is tokenised when it is read."""

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    prompt: str = ""
    text: str = ""
    retokenised: bool = False  # output_ids are of a text


def read_answers(file: str, target: OpenTarget) -> dict[int, ServedAnswer]:
    """The answers in a file by the numbers of their lines. Raises `UserError` naming a line that is none."""
    found = {}
    for number, row in read_file(Path(file)):
        try:
            found[number] = with_ids(construct(ServedAnswer, row), target)
        except UserError as error:
            said = 'expected {"prompt_ids": […], "output_ids": […], "temperature": 0}, or texts: "prompt", "text"'
            raise UserError(f"{file}:{number}: {error}; {said}") from None
    require(bool(found), "answers", file, "a file with a line for each answer")
    return found


def with_ids(answer: ServedAnswer, target: OpenTarget) -> ServedAnswer:
    """`answer` with the ids of its texts. Raises `UserError` for what the target can neither read nor say."""
    most = context_limit(target.config)
    for key, text, ids in (("prompt", answer.prompt, answer.prompt_ids), ("text", answer.text, answer.output_ids)):
        require(not (text and ids), key, text, "a text or ids, not both")
    if answer.prompt:
        answer = replace(answer, prompt_ids=render_prompt((answer.prompt,), target.tokenizer, "none", most=most))
    if answer.text:
        answer = replace(answer, output_ids=ids_within(answer.text, target.tokenizer, most), retokenised=True)
    for key, ids in (("prompt_ids", answer.prompt_ids), ("output_ids", answer.output_ids)):
        known = ids and min(ids) >= 0 and max(ids) < target.config.vocab_size
        require(bool(known), key, ids[:5], f"at least one id, all less than {target.config.vocab_size}")
    length = len(answer.prompt_ids) + len(answer.output_ids)
    require(length <= most, "tokens of prompt and output", length, f"at most {most}, the target's context")
    return answer

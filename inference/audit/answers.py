"""The answers to audit, as a file has them: a prompt, what was said after it, and how its tokens were chosen."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from data_prep.text.sources import read_file
from draft_models.targets.open_target import OpenTarget
from inference.settings.sampling import SamplingConfig
from outrider.errors import UserError, require
from outrider.settings import construct


@dataclass(frozen=True)
class Answer(SamplingConfig):
    """A line: an answer, and how its tokens were chosen. What has texts and no ids is tokenised when it is read."""

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    prompt: str = ""
    text: str = ""


def read_answers(file: str, target: OpenTarget) -> dict[int, Answer]:
    """The answers in a file by the numbers of their lines. Raises `UserError` naming a line that is none."""
    found = {}
    for number, row in read_file(Path(file)):
        try:
            found[number] = _with_ids(construct(Answer, row), target)
        except UserError as error:
            said = 'expected {"prompt_ids": […], "output_ids": […], "temperature": 0}, or texts: "prompt", "text"'
            raise UserError(f"{file}:{number}: {error}; {said}") from None
    require(bool(found), "answers", file, "a file with a line for each answer")
    return found


def _with_ids(answer: Answer, target: OpenTarget) -> Answer:
    if answer.prompt:
        answer = replace(answer, prompt_ids=target.tokenizer(answer.prompt)["input_ids"])
    if answer.text:
        ids = target.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        answer = replace(answer, output_ids=ids)
    for key, ids in (("prompt_ids", answer.prompt_ids), ("output_ids", answer.output_ids)):
        known = ids and min(ids) >= 0 and max(ids) < target.config.vocab_size
        require(bool(known), key, ids[:5], f"at least one id, all less than {target.config.vocab_size}")
    return answer

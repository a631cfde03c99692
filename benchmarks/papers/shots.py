"""Prompts with one solved example before them, as EESD's paper asks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.base.errors import UserError
from outrider.data_prep.text.prompt_records import to_prompt
from outrider.data_prep.text.prompts import Prompt
from outrider.data_prep.text.sources import read_file

ANSWERS = ("answer", "summary", "canonical_solution", "output")  # of GSM8K, XSum, HumanEval, Alpaca


def with_example(prompts: Sequence[Prompt], file: str) -> list[Prompt]:
    """`prompts` of `file`, each after the last record of it that says its answer and is none of them.

    Chat gets the example as an earlier turn, other text before it. A file without answers leaves them as they are, and
    a line says so, as MT-Bench beside GSM8K. Raises `UserError` where `file` is none.
    """
    if not Path(file).expanduser().is_file():
        raise UserError(f"--shot: {file} is no file of records with answers; give --prompts NAME=FILE")
    asked = {prompt.turns[0] for prompt in prompts}
    example: tuple[str, str] | None = None
    for number, raw in read_file(Path(file).expanduser()):
        answers = [raw[key] for key in ANSWERS if raw.get(key)] if isinstance(raw, dict) else []
        if answers and (turn := to_prompt(raw, f"{file}:{number}", number).turns[0]) not in asked:
            example = (turn, str(answers[0]))
    if example is None:
        print(f"--shot: no record of {file} has an answer to show ({', '.join(ANSWERS)}): its prompts stay without one")
        return list(prompts)
    return [
        replace(prompt, turns=(*example, *prompt.turns) if prompt.chat else ("\n\n".join((*example, prompt.turns[0])),))
        for prompt in prompts
    ]

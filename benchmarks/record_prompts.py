"""Training prompts of the kinds that the record is measured on, from local files.

    python benchmarks/record_prompts.py --chats chat_outputs.parquet --maths gsm8k_train.jsonl --python train.jsonl \
        --without mt_bench.jsonl --without gsm8k_test.jsonl --out DIR

Every kind is written in the shape that its benchmark has: a question, a problem in words, a text to summarise, the head
of a function to complete. `DIR/a.jsonl` and `DIR/b.jsonl` share no prompt, so that one can be answered greedily and the
other by sampling.
"""

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import load_dataset

from data_prep.text.prompts import read_prompts
from outrider.files import write_atomically

QUESTION = re.compile(r"(?<=[.!?\n] )[A-Z][^.!?\n\"*|]{30,160}\?")
SUMMARY = ("Summarize: {}", "Summarize: {}", "Summarize the following text.\n\n{}", "{}\n\nTL;DR:")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", required=True, help="parquet with the columns instruction and output")
    parser.add_argument("--maths", required=True, help="JSONL with the key question")
    parser.add_argument("--python", required=True, help="prompts of write_prompts.py")
    which = "prompts that are asked in the record, in any layout that evaluate-checkpoint reads"
    parser.add_argument("--without", action="append", default=[], help=which)
    parser.add_argument("--each", type=int, default=4000, help="prompts of a kind, at most")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    chance = random.Random(0)
    chats = load_dataset("parquet", data_files=given.chats, split="train")
    outputs = chats.shuffle(seed=0).select(range(min(len(chats), 40_000)))["output"]
    maths, python = (read_rows(path) for path in (given.maths, given.python))
    asked = {turn.strip() for path in given.without for prompt in read_prompts(path) for turn in prompt.turns}
    kinds = {
        "instructions": sorted(set(chats["instruction"])),
        "chat": sorted(set(questions_in(outputs))),
        "summaries": list(texts_to_summarise(outputs, chance)),
        "maths": [row["question"] for row in maths],
        "code": sorted(set(function_heads())),
        "python": [row["turns"][0] for row in python],
    }
    kinds = {kind: [text for text in texts if text.strip() not in asked] for kind, texts in kinds.items()}
    rows = [
        {"id": f"{kind}-{number}", "category": kind, "turns": [text]}
        for kind, texts in kinds.items()
        for number, text in enumerate(chance.sample(texts, min(given.each, len(texts))))
    ]
    chance.shuffle(rows)
    for name, part in (("a", rows[::2]), ("b", rows[1::2])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        write_atomically(Path(given.out) / f"{name}.jsonl", lines.encode())
    print({kind: min(given.each, len(texts)) for kind, texts in kinds.items()})


def read_rows(path: str) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def questions_in(outputs: list[str]) -> Iterator[str]:
    """What chat models asked, each a question that stands alone as well as such questions do."""
    for text in outputs:
        yield from QUESTION.findall(text)[:2]


def texts_to_summarise(outputs: list[str], chance: random.Random) -> Iterator[str]:
    """Longer texts under an order to summarise them."""
    for text in outputs:
        if 1000 <= len(text) <= 4000 and "```" not in text:
            yield chance.choice(SUMMARY).format(text.strip())


def function_heads() -> Iterator[str]:
    """Signature and docstring of the standard library's documented functions, to be completed."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(ast.get_docstring(node) or "") > 60:
                head = ast.FunctionDef(node.name, node.args, node.body[:1], [], node.returns, lineno=0)
                yield ast.unparse(ast.fix_missing_locations(head)) + "\n"


if __name__ == "__main__":
    main()

"""Prompts of six kinds on which no setting was chosen, from public files; results/fresh_prompts.json says which.

    python benchmarks/fresh_prompts.py --sources FOLDER --out FOLDER --seen mt_bench.jsonl gsm8k_test.jsonl=8,10,16

A text is left out if it was measured or learnt from before, or is in an earlier text of the sources: if all its words
are the words of a text that was seen, or any 13 words in a row stand in one. Seen are the texts of --seen; of
FILE=COUNTS those that a measurement of so many took, the first ones and evenly spread ones. Chat of more than 2,000
characters is left out too. Of the texts left of a kind 35 are chosen, evenly spread.

--sources has the files of SOURCES. Without --out nothing is written: it only fails if the manifest has other prompts.
"""

import argparse
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

from outrider.base.errors import require
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.commands import reported
from outrider.data_prep.text.data_files import read_file
from outrider.data_prep.text.prompt_records import to_prompt

MANIFEST = Path(__file__).parent / "results" / "fresh_prompts.json"
SOURCES = {"spec_bench.jsonl": "hemingkx/Spec-Bench, fd2c1cd, data/spec_bench/question.jsonl",
           "arena_hard.jsonl": "lmarena/arena-hard-auto, 196f6b8, data/arena-hard-v0.1/question.jsonl",
           "humaneval.jsonl.gz": "openai/human-eval, data/HumanEval.jsonl.gz"}  # fmt: skip
KINDS = {"chat": ("arena_hard.jsonl", ""), "code": ("humaneval.jsonl.gz", ""),
         "maths": ("spec_bench.jsonl", "math_reasoning"), "translation": ("spec_bench.jsonl", "translation"),
         "questions": ("spec_bench.jsonl", "qa"), "documents": ("spec_bench.jsonl", "rag")}  # fmt: skip
EACH, IN_A_ROW, LONGEST = 35, 13, 2000


def texts(file: Path, category: str = "") -> list[tuple[str, str]]:
    """The id and the text of every turn in a file, of one category or of all."""
    rows = [(number, raw) for number, raw in read_file(file) if isinstance(raw, dict)]
    return [(f"{file.name.partition('.')[0]}/{raw.get('question_id') or raw.get('uid') or number - 1}", turn)
            for number, raw in rows if category in ("", raw.get("category"))
            for turn in to_prompt(raw, f"{file}:{number}", number).turns]  # fmt: skip


def parts(text: str) -> set[tuple[str, ...]]:
    """All words of a text, and every `IN_A_ROW` of them in a row."""
    words = tuple(re.findall(r"\w+", text.lower()))
    return {words, *(words[at : at + IN_A_ROW] for at in range(len(words) - IN_A_ROW + 1))}


def made(sources: Path, given: list[str]) -> tuple[dict[str, bytes], dict[str, object]]:
    """By kind the file of the chosen prompts; and the manifest. given: --seen."""
    known, files, told = set[str](), dict[str, bytes](), dict[str, object]()
    read = {f"seen: {Path(file).name}": (Path(file), count) for file, _, count in (one.partition("=") for one in given)}
    for file, counts in read.values():
        every = [text for _, text in texts(file)]
        for count in map(int, counts.split(",") if counts else [len(every)]):
            known |= {*every[:count], *(every[at * len(every) // count] for at in range(count))}
    seen = {part for text in known for part in parts(text)}
    for kind, (source, category) in KINDS.items():
        left, why = list[tuple[str, str]](), Counter[str]()
        for name, text in texts(sources / source, category):
            own = "too long" if kind == "chat" and len(text) > LONGEST else "seen" if parts(text) & seen else "left"
            why[own] += 1
            if own == "left":
                seen |= parts(text)
                left.append((name, text))
        chosen = [left[at * len(left) // EACH] for at in range(EACH)]
        rows = [{"task_id": name, "prompt": text} if kind == "code" else
                {"question_id": name, "category": kind, "turns": [text]} for name, text in chosen]  # fmt: skip
        files[kind] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        told[kind] = {"source": source, "category": category, "texts": dict(why), "ids": [name for name, _ in chosen],
                      "sha256": [hashlib.sha256(text.encode()).hexdigest() for _, text in chosen]}  # fmt: skip
    inputs = {name: (sources / name, come) for name, come in SOURCES.items()} | read
    used = {name: [said, hashlib.sha256(file.read_bytes()).hexdigest()] for name, (file, said) in inputs.items()}
    return files, {"rule": " ".join(str(__doc__).split("\n\n")[2].split()), "files": used, "kinds": told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--seen", nargs="+", default=[], metavar="FILE[=COUNTS]")
    parser.add_argument("--out", type=Path, help="where the file of every kind is written")
    options = parser.parse_args()
    with reported():
        files, manifest = made(options.sources, options.seen)
        if options.out is None:
            same = manifest == json.loads(MANIFEST.read_text())
            require(same, "sources", str(options.sources), f"the files of {MANIFEST.name}, which has other prompts")
            return
        for kind, content in files.items():
            write_atomically(require_writable(options.out) / f"{kind}.jsonl", content)
        write_json(MANIFEST, manifest)


if __name__ == "__main__":
    main()

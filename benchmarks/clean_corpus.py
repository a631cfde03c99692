"""Write the answers of a corpus that a measurement may draft from: none of its models, none to its prompts.

    python benchmarks/clean_corpus.py chat_outputs.parquet --without vicuna --prompts mt_bench.jsonl --out clean.jsonl

The corpus is of AlpacaEval's outputs: records with an instruction, an output and a generator, each once. Left out are
answers of generators that have a word of --without in their names, and those that share 13 words in a row with a
prompt, or all words, or are to an instruction that does. What stays comes in an order by hash, so its first records are
a sample (--records).
"""

import argparse
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

from fresh_prompts import parts, texts

from outrider.base.errors import require
from outrider.base.files import write_atomically
from outrider.commands import reported
from outrider.data_prep.text.data_files import read_file

NAMES = ("generator", "instruction", "output")


def hashed(records: Sequence[Any]) -> dict[bytes, Any]:
    """The records by their hash."""
    lacking = [name for name in NAMES if any(name not in record for record in records)]
    require(not lacking, "corpus", lacking, f"records with {', '.join(NAMES)}")
    return {hashlib.sha256("".join(own[name] for name in NAMES).encode()).digest(): own for own in records}


def clean(answers: Mapping[bytes, Any], without: Sequence[str], asked: Set[Any], why: Counter[str]) -> Iterator[str]:
    """The outputs that stay. asked: the parts of all prompts. why: counts what is left out."""
    known = cache(lambda instruction: not asked.isdisjoint(parts(instruction)))
    for _, answer in sorted(answers.items()):
        if any(word in answer["generator"].lower() for word in without):
            why["of a model"] += 1
        elif known(answer["instruction"]) or not asked.isdisjoint(parts(answer["output"])):
            why["to a prompt"] += 1
        elif answer["output"]:
            yield answer["output"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--without", nargs="*", default=[], metavar="WORD", help="of the names of generators")
    parser.add_argument("--prompts", nargs="*", default=[], type=Path, metavar="FILE")
    parser.add_argument("--records", type=int, help="at most")
    parser.add_argument("--out", type=Path, required=True, help="a JSONL file")
    options = parser.parse_args()
    with reported():
        asked = {part for file in options.prompts for _, text in texts(file) for part in parts(text)}
        answers = hashed([record for _, record in read_file(options.corpus)])
        found = itertools.islice(clean(answers, options.without, asked, why := Counter()), options.records)
        kept = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in found]
        write_atomically(options.out, "".join(kept).encode())
    print(f"{options.out}: {len(kept)} answers; left out before the last of them: {dict(why)}")


if __name__ == "__main__":
    main()

"""The counts that a paper's results are made of, kept beside them."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.base.files import write_atomically
from papers.judging import Kept


def counts_file(out: Path, paper: str, label: str) -> Path:
    """Where the counts of an entry lie beside the results."""
    return out.parent / "counts" / f"{paper}_{label}.jsonl.gz"


def of_entry(entry: Mapping[str, Any], counts: Kept) -> Kept:
    """Those of `counts` that the entry is made of."""
    keys = {row["key"] for table in entry["tables"].values() for row in table["rows"].values()}
    return {where: own for where, own in counts.items() if where[0] in keys and where[1] in entry["asked"]}


def read_kept(path: Path) -> Kept:
    """Counts by key and prompt; none where there is no such file."""
    if not path.exists():
        return {}
    found = {}
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        one = json.loads(line)
        for prompt, amounts in one["prompts"].items():
            pairs = zip(one["names"], amounts, strict=True)
            found[one["key"], prompt] = {name: amount for name, amount in pairs if amount is not None}
    return found


def write_kept(path: Path, counts: Kept) -> None:
    """Counts, a line for every key; the same counts make the same file."""
    by_key: dict[str, dict[str, Mapping[str, float]]] = {}
    for (key, prompt), own in sorted(counts.items()):
        by_key.setdefault(key, {})[prompt] = own
    lines = []
    for key, prompts in by_key.items():
        names = sorted({name for own in prompts.values() for name in own})
        amounts = {prompt: [own.get(name) for name in names] for prompt, own in prompts.items()}
        lines.append(json.dumps({"key": key, "names": names, "prompts": amounts}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, gzip.compress("".join(lines).encode(), mtime=0))

"""Prompts for measuring decoding: held-out library files, benchmark files, or texts given inline."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from outrider.base.errors import UserError, require
from outrider.data_prep.text.data_files import read_file
from outrider.data_prep.text.messages import SkipRecordError
from outrider.data_prep.text.prompt_records import Prompt, prompt_text, to_prompt
from outrider.data_prep.text.records import Counts, turn_key, warn_of_unused
from outrider.data_prep.text.settings import BENCHMARKS, DataConfig, prompt_file
from outrider.data_prep.text.sources import Split, read_records

Element = TypeVar("Element")
_FEWEST, _HELDOUT = 10, 12  # the fewest prompts of a file; the fewest that are held out, if that is not more than half
_STRIDE = 4  # further prompts of a library file begin this many prompt lengths apart


def read_prompts(
    prompts: str | Sequence[str],
    *,
    limit: int | None = None,
    prompt_chars: int = 1000,
    heldout_fraction: float = DataConfig.heldout_fraction,
) -> list[Prompt]:
    """Prompts, in a fixed order.

    prompts: one of four things.
      "python_stdlib": beginnings of held-out files of the standard library, `prompt_chars` long and cut at a line end;
      one per file, and more from within the files if `limit` needs them.
      A path of a JSONL, JSON or parquet file. Its columns determine the layout: MT-Bench / Spec-Bench (turns, or a list
      in prompt), HumanEval (task_id, prompt), GSM8K (question), Alpaca (instruction, input), XSum (document), CNN/DM
      (article), WMT (translation), the user's turns of a conversation (messages, ShareGPT), plain prompt or text, or a
      JSON list of strings. A text file is one prompt.
      Questions are chat, the others are text to complete.
      The name of a benchmark (see `prompt_file`).
      A list of texts to complete.
    limit: the number of prompts to keep, evenly spread, with categories balanced.
    heldout_fraction: at most the one used in training.

    Raises `UserError` that names file and record for anything unusable.
    """
    require(limit is None or limit >= 1, "limit", limit, "at least 1, or null")
    if isinstance(prompts, str) and prompts == "python_stdlib":
        require(prompt_chars >= 1, "prompt_chars", prompt_chars, "at least 1")
        prompt_list = _from_library(prompt_chars, heldout_fraction, limit)
    elif isinstance(prompts, str):
        path = prompt_file(prompts)
        prompt_list = list(_read_prompt_file(path, prompts if prompts in BENCHMARKS else str(path)))
    else:
        prompt_list = [
            Prompt(f"inline:{i}", "inline", (prompt_text(t, f"inline:{i}"),), False) for i, t in enumerate(prompts, 1)
        ]
    if not prompt_list:
        raise UserError(f"prompts={prompts}: no prompt in it")
    if limit is not None and len(prompt_list) < limit and isinstance(prompts, str):
        print(f"num_prompts={limit}: {prompts} has {len(prompt_list)} prompts, and all of them are taken", flush=True)
    prompt_list = _with_unique_ids(prompt_list)
    return prompt_list if limit is None else _balance_categories(prompt_list, limit)


def _read_prompt_file(path: Path, label: str) -> Iterator[Prompt]:
    """The prompts of a file; warns of those that cannot be asked, of what is not read, and of texts to continue."""
    counts, number = Counts(), 0
    for number, raw in read_file(path):
        where = f"{label}:{number}" if number else label
        try:
            prompt = to_prompt(raw, where, number, counts)
        except SkipRecordError as error:
            counts.refuse(error.reason, f"{where}: {error}")
            continue
        counts["texts"] += not prompt.chat
        yield prompt
    warn_of_unused(counts, counts.first)
    if counts["texts"] and label not in BENCHMARKS:
        remedy = "the columns 'turns' and 'question' ask" if number else "a text file is one prompt"
        print(f"prompts={label}: {counts['texts']} texts to continue as they stand; {remedy}", flush=True)


def split_prompts(
    prompts: Sequence[Prompt], heldout_fraction: float, where: str, *, by_hash: bool = False
) -> dict[Split, list[Prompt]]:
    """The prompts for training and those held out, without duplicates; equal first turns are on the same side.

    The held-out prompts are evenly spread. by_hash: of equal first turns only the first prompt is kept, and a hash of
    the first turn orders all prompts and chooses those held out, so most stay on their side when others are added. It
    is not that of `is_heldout`, by which a training holds out a part of the answers to the rest. Raises `UserError`
    naming `where` for too few.
    """
    by_turn: dict[str, list[Prompt]] = {}
    for prompt in {(prompt.system, prompt.turns): prompt for prompt in prompts}.values():
        by_turn.setdefault(turn_key(prompt.turns[0]), []).append(prompt)
    n_turns = len(by_turn)
    if n_turns < _FEWEST:
        remedy = 'one {"turns": ["…"]} a line of a .jsonl file; any other text file is one prompt'
        raise UserError(f"{where}: {n_turns} prompts with different first turns; expected at least {_FEWEST}: {remedy}")
    count = max(min(round(heldout_fraction * n_turns), n_turns - 1), min(_HELDOUT, n_turns // 2))
    heldout_numbers = {*range(count)} if by_hash else {number * n_turns // count for number in range(count)}
    splits: dict[Split, list[Prompt]] = {"train": [], "heldout": []}
    # Bytes 8 on: the first 8 decide which answers a training holds out, and the two choices must be independent.
    ordered_keys = sorted(by_turn, key=lambda key: hashlib.sha256(key.encode()).digest()[8:]) if by_hash else by_turn
    for number, key in enumerate(ordered_keys):
        splits["heldout" if number in heldout_numbers else "train"] += by_turn[key][: 1 if by_hash else None]
    return splits


def _with_unique_ids(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts with unique ids: a repeated id becomes "id#2", "id#3", …, also if it is the id of a turn.

    Results, random streams and statistics are keyed by these ids, so a new id never equals one given in the file.
    """
    file_ids, used_ids, last_suffix = {prompt.id for prompt in prompts}, set[str](), Counter[str]()
    unique_prompts = []
    for prompt in prompts:
        copy = prompt
        while not used_ids.isdisjoint(ids := {copy.id, *copy.turn_ids}) or (copy is not prompt and ids & file_ids):
            last_suffix[prompt.id] = max(2, last_suffix[prompt.id] + 1)
            copy = replace(prompt, id=f"{prompt.id}#{last_suffix[prompt.id]}")
        used_ids |= ids
        unique_prompts.append(copy)
    return unique_prompts


def _from_library(prompt_chars: int, heldout_fraction: float, limit: int | None) -> list[Prompt]:
    """The first window of each held-out library file; with a limit the second ones follow if there are too few, …"""
    config = DataConfig(heldout_fraction=heldout_fraction)
    texts = {record["id"]: record["text"] for record in read_records(config, "heldout") if "text" in record}
    windows_by_file = {name: list(_windows(text, prompt_chars)) for name, text in texts.items()}
    windows_by_file = {name: windows for name, windows in windows_by_file.items() if windows}
    prompts: list[Prompt] = []
    for index in range(max(map(len, windows_by_file.values()), default=0) if limit is not None else 1):
        candidates = [(name, *windows[index]) for name, windows in windows_by_file.items() if index < len(windows)]
        candidates = candidates if limit is None else spread_evenly(candidates, limit - len(prompts))
        prompts += [Prompt(f"{name}:{line}", "python_stdlib", (text,), False) for name, line, text in candidates]
    return prompts


def _windows(text: str, prompt_chars: int) -> Iterator[tuple[int, str]]:
    """(line number, about prompt_chars of text): whole lines, followed by at least as much text."""
    start = 0
    while start + 2 * prompt_chars <= len(text):
        stop = text.rfind("\n", start, start + prompt_chars) + 1
        if stop > start and text[start:stop].strip():
            yield text.count("\n", 0, start) + 1, text[start:stop]
        start = text.find("\n", start + _STRIDE * prompt_chars) + 1
        if not start:
            return


def _balance_categories(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts: categories as equal as their sizes allow, evenly spread within each."""
    by_category: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(i)
    quotas = dict.fromkeys(by_category, 0)
    for _ in range(min(limit, len(prompts))):
        category = min((n for n in by_category if quotas[n] < len(by_category[n])), key=lambda n: quotas[n])
        quotas[category] += 1
    return [prompts[i] for i in sorted(i for n, group in by_category.items() for i in spread_evenly(group, quotas[n]))]


def spread_evenly(items: list[Element], count: int) -> list[Element]:
    """At most `count` of the items, evenly spread."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]

"""Prompts of several categories in turn."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from outrider.base.errors import require
from outrider.data_prep.text.prompts import Prompt, read_prompts


def read_categories(named: Sequence[str], per_category: int, turns: int = 1) -> list[Prompt]:
    """`per_category` prompts of every NAME=FILE; of a conversation, the first `turns`. The categories take turns, so
    that a measurement that is stopped has the same number of each."""
    require(per_category >= 1, "per-category", per_category, "at least 1")
    groups = []
    for one in named:
        name, _, file = one.partition("=")
        require(bool(name and file), "prompts", one, "NAME=FILE")
        found = read_prompts(file, limit=per_category)
        groups.append([replace(p, id=f"{name}/{p.id}", category=name, turns=p.turns[:turns]) for p in found])
    names = [group[0].category for group in groups]
    require(len(set(names)) == len(names), "prompts", names, "another name for every file")
    return [prompt for level in itertools.zip_longest(*groups) for prompt in level if prompt is not None]

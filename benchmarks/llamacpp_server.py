"""llama.cpp through llama-cpp-python, in a separate process: requests and answers are lines of JSON.

peer_llamacpp.py starts it with the interpreter that has llama-cpp-python. It imports nothing of this project. The first
line says what to load, every other line asks for a continuation:

    {"model": FILE, "draft": FILE or null, "ids": null, "positions": 1024, "threads": 2, "draft_tokens": 4,
     "max_ngram": 3, "cache": "f32"}
    {"arm": "llama_cpp", "prompt": [1, 2, 3], "eos": [2], "max_new_tokens": 128}

An answer has the tokens of every pass of the target, the second at which it began and the seconds at which each pass
ended. The clock runs around the package's `generate`, so it measures what a user of the package waits for. llama.cpp's
own counters are not used: they count every pass of several tokens as prefill, also one that verifies a draft.
"""

import contextlib
import json
import os
import sys
import time

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

TYPES = {"f32": 0, "f16": 1, "bf16": 30}  # numbers of ggml; Python has no names for some


class SmallModel(LlamaDraftModel):
    """Drafts with another model, which keeps its cache for the common prefix of the texts.

    ids: the target's id of each of its ids; its last id means any other token and is not proposed. None: the same ids.
    """

    def __init__(self, llm, count, ids):
        self.llm, self.count, self.ids = llm, count, ids
        self.place = {token: own for own, token in enumerate(ids or ())}

    def __call__(self, input_ids, /, **kwargs):
        text = input_ids.tolist()
        if self.ids is not None:
            text = [self.place.get(token, len(self.ids)) for token in text]
        drafted = []
        for count, own in enumerate(self.llm.generate(text, temp=0.0), 1):
            if self.ids is not None and own == len(self.ids):
                break
            drafted.append(own if self.ids is None else self.ids[own])
            if count == self.count:
                break
        return np.array(drafted, dtype=np.intc)


def load(path, asked, drafter=None, *, all_logits=False):
    """A model with a context for a text and a draft."""
    positions = asked["positions"] + asked["draft_tokens"] + 1
    cache = TYPES[asked["cache"]]
    return llama_cpp.Llama(
        path, n_ctx=positions, n_batch=positions, n_ubatch=512, n_threads=asked["threads"], type_k=cache, type_v=cache,
        n_threads_batch=asked["threads"], draft_model=drafter, logits_all=all_logits, verbose=False,
    )  # fmt: skip


def load_arms(asked):
    """The models by arm; an arm that drafts has the target a second time, with its own cache."""
    count = asked["draft_tokens"]
    looking = LlamaPromptLookupDecoding(max_ngram_size=asked["max_ngram"], num_pred_tokens=count)
    arms = {
        "llama_cpp": load(asked["model"], asked),
        "llama_cpp_prompt_lookup": load(asked["model"], asked, looking, all_logits=True),
    }
    if asked["draft"]:
        small = SmallModel(load(asked["draft"], asked), count, asked["ids"])
        arms["llama_cpp_small_lm"] = load(asked["model"], asked, small, all_logits=True)
    return arms


def answer(llm, prompt, eos, max_new_tokens):
    """The tokens of every pass and the seconds at which it ended; first the start."""
    llm.reset()
    passes, at, run = [], [], llm.eval

    def watched(tokens):
        passes.append([])
        at.append(0.0)
        run(tokens)

    llm.eval = watched
    try:
        began = time.perf_counter()
        for count, token in enumerate(llm.generate(prompt, temp=0.0), 1):
            passes[-1].append(token)
            at[-1] = time.perf_counter()
            if token in eos or count == max_new_tokens:
                break
    finally:
        del llm.eval
    return {"passes": passes, "at": [began, *at]}


def main():
    replies = os.fdopen(os.dup(1), "w")  # llama.cpp may print to the standard output
    os.dup2(2, 1)
    arms = load_arms(json.loads(sys.stdin.readline()))
    print(json.dumps({"arms": sorted(arms)}), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found = answer(arms[asked["arm"]], asked["prompt"], set(asked["eos"]), asked["max_new_tokens"])
        print(json.dumps(found), file=replies, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

"""Evaluating a checkpoint: load the target and its drafter, run all arms over all prompts, write the report."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from draft_models.checkpoint import fingerprint_target, from_pretrained, read_meta
from draft_models.errors import UserError
from draft_models.files import require_writable
from draft_models.target import (
    LayerStack,
    load_config,
    load_layers,
    load_tokenizer,
    open_target,
    pick_device,
    pick_dtype,
)
from inference.decode import Clock
from inference.evaluation import (
    AUTOREGRESSIVE,
    Arm,
    PromptResult,
    excuse_ties,
    make_arms,
    measure,
    prepare,
    synchronized_clock,
)
from inference.report import build_report, is_lossless, markdown, write_reports
from inference.settings import EvaluateConfig

Messages = list[dict[str, str]]
Render = Callable[[PreTrainedTokenizerBase, Messages, bool], list[int]]
WARM_UP_TOKENS = 8


class PromptLike(Protocol):
    """What evaluation needs to know of a prompt (see `data_prep.prompts.Prompt`)."""

    @property
    def id(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def turns(self) -> tuple[str, ...]: ...
    @property
    def chat(self) -> bool: ...


def evaluate_checkpoint(config: EvaluateConfig, prompts: Sequence[PromptLike], render: Render) -> None:
    """Compare the methods of `config` on `prompts` and write the report to `config.out_dir`.

    `render(tokenizer, messages, chat)` gives the ids of a conversation that ends with the user's turn. Ends
    the process with status 1, after writing the report, if any method emitted other tokens than the target.
    """
    out_dir = require_writable(config.out_dir)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    meta = read_meta(config.checkpoint)
    source, revision = config.target or meta.fingerprint.target, config.revision or meta.fingerprint.revision
    target_config = load_config(source, revision)
    files = open_target(source, revision)
    tokenizer = load_tokenizer(source, revision)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, target_config, device)
    fingerprint = fingerprint_target(files, target_config, tokenizer)
    drafter = from_pretrained(config.checkpoint, target_config, fingerprint, dtype=dtype, device=device)
    rendered = [render(tokenizer, [{"role": "user", "content": p.turns[0]}], p.chat) for p in prompts]
    require_fits(prompts, rendered, target_config.max_position_embeddings - config.max_new_tokens)

    every = range(target_config.num_hidden_layers)
    stack = LayerStack(load_layers(files, target_config, every, dtype=dtype, device=device))
    plain = None
    if config.compare_transformers:  # another copy where ours is packed: transformers runs the checkpoint as it is
        plain = load_layers(files, target_config, every, dtype=dtype, device=device)
    prepare(stack, drafter)
    eos = frozenset() if config.ignore_eos else end_tokens(source, revision, target_config, tokenizer)

    def arms_for(max_new_tokens: int, clock: Clock = time.perf_counter) -> dict[str, Arm]:
        return make_arms(
            stack, drafter, config.methods, plain, max_new_tokens=max_new_tokens, eos=eos, seed=config.seed, clock=clock
        )

    for warm_up in arms_for(WARM_UP_TOKENS).values():
        warm_up(rendered[0])
    profilers: dict[str, Arm] = {}
    if device.type == "cuda":
        synchronized = arms_for(config.max_new_tokens, synchronized_clock)
        profilers = {name: synchronized[name] for name in config.methods}
    results = run_prompts(config, prompts, render, tokenizer, stack, arms_for(config.max_new_tokens), profilers)
    facts: dict[str, Any] = {
        "target": source,
        "drafter": str(config.checkpoint),
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "max_new_tokens": config.max_new_tokens,
    }
    reports = [
        build_report(name, results, {**facts, "settings": vars(method)}, config.seed)
        for name, method in config.methods.items()
    ]
    texts = {
        (r.prompt_id, arm): tokenizer.decode(list(g.tokens), skip_special_tokens=True)
        for r in results
        for arm, g in r.generations.items()
    }
    write_reports(out_dir, reports, results, texts)
    print(markdown(reports))
    wrong = [report["method"] for report in reports if not is_lossless(report)]
    if wrong:
        print(f"error: not lossless: {', '.join(wrong)}; see {out_dir}/generations.jsonl", file=sys.stderr)
        sys.exit(1)


def run_prompts(
    config: EvaluateConfig,
    prompts: Sequence[PromptLike],
    render: Render,
    tokenizer: PreTrainedTokenizerBase,
    stack: LayerStack,
    arms: dict[str, Arm],
    profilers: dict[str, Arm],
) -> list[PromptResult]:
    """Every turn of every prompt through every arm; a later turn's history is the target's own answer."""
    results: list[PromptResult] = []
    for prompt in tqdm(prompts, desc="evaluate", unit="prompt", disable=None):
        messages: Messages = []
        for number, turn in enumerate(prompt.turns):
            messages.append({"role": "user", "content": turn})
            ids = render(tokenizer, messages, prompt.chat)
            name = prompt.id if len(prompt.turns) == 1 else f"{prompt.id}/turn{number + 1}"
            result = measure(
                arms,
                ids,
                prompt_id=name,
                category=prompt.category,
                repeats=config.repeats,
                turn=len(results),
                profilers=profilers,
            )
            results.append(replace(result, excused=excuse_ties(stack, result)))
            answer = tokenizer.decode(list(result.generations[AUTOREGRESSIVE].tokens), skip_special_tokens=True)
            messages.append({"role": "assistant", "content": str(answer)})
    return results


def end_tokens(
    source: str, revision: str | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The ids that end a text: generation_config.json's, else config.json's, else the tokenizer's."""
    try:
        listed = GenerationConfig.from_pretrained(source, revision=revision or "main").eos_token_id
    except OSError:
        listed = None
    for candidate in (listed, config.eos_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return frozenset(candidate if isinstance(candidate, list) else [candidate])
    return frozenset()


def require_fits(prompts: Sequence[PromptLike], rendered: Sequence[Sequence[int]], limit: int) -> None:
    """Raise `UserError` naming the first prompt that is empty or longer than `limit` tokens."""
    for prompt, ids in zip(prompts, rendered, strict=True):
        if not 1 <= len(ids) <= limit:
            raise UserError(
                f"prompt {prompt.id}: {len(ids)} tokens, expected 1 to {limit} (the target's context less "
                "max_new_tokens); drop or shorten it"
            )

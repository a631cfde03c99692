"""Evaluating a checkpoint: load the target and its drafter, run all arms over all prompts, write the report."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draft_models.attention import ATTENTION
from draft_models.calibration import load_calibration
from draft_models.card import add_report
from draft_models.checkpoint import fingerprint_target, from_pretrained, read_meta
from draft_models.errors import UserError
from draft_models.files import require_writable
from draft_models.small_lm import load_small_lm
from draft_models.target import (
    LayerStack,
    load_config,
    load_layers,
    load_tokenizer,
    open_target,
    pick_device,
    pick_dtype,
    position_limit,
)
from draft_models.trigram import vocabulary_digest
from inference.decode import Clock
from inference.evaluation import (
    AUTOREGRESSIVE,
    Arm,
    Drafters,
    PromptResult,
    excuse_ties,
    make_arms,
    measure,
    open_table,
    prepare,
    synchronized_clock,
    with_measured_delta,
)
from inference.packing import can_pack
from inference.report import build_report, is_lossless, markdown, relate_to_chain, write_reports
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
    source, revision = find_target(config)
    target_config = load_config(source, revision)
    files = open_target(source, revision)
    tokenizer = load_tokenizer(source, revision)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, target_config, device)
    early_exit = small_lm = calibration = None
    if config.checkpoint is not None:
        fingerprint = fingerprint_target(files, target_config, tokenizer)
        early_exit = from_pretrained(config.checkpoint, target_config, fingerprint, dtype=dtype, device=device)
    if config.small_lm is not None:
        small_lm = load_small_lm(config.small_lm, tokenizer, dtype=dtype, device=device)
    if any(method.stop.rule == "calibrated" for method in config.methods.values()):
        assert config.checkpoint is not None
        calibration = load_calibration(config.checkpoint, read_meta(config.checkpoint).weights_sha256, device)
    table = open_table(config, vocabulary_digest(tokenizer.get_vocab()), target_config.vocab_size)
    drafters = Drafters(early_exit, small_lm, calibration, table)
    rendered = [render(tokenizer, [{"role": "user", "content": p.turns[0]}], p.chat) for p in prompts]
    context = target_config.max_position_embeddings
    if small_lm is not None:
        context = min(context, position_limit(small_lm.config) or context)
    require_fits(prompts, rendered, context - config.max_new_tokens)

    plain = load_plain(source, revision, dtype, device)
    if can_pack(device, dtype):  # ours is another copy then, and transformers runs the checkpoint as it is
        every = range(target_config.num_hidden_layers)
        stack = LayerStack(load_layers(files, target_config, every, dtype=dtype, device=device))
    else:
        stack = LayerStack(plain)
    prepare(stack, drafters)
    eos = frozenset() if config.ignore_eos else end_tokens(source, revision, target_config, tokenizer)

    waiting = synchronized_clock if device.type == "cuda" else time.perf_counter
    methods = {
        name: with_measured_delta(method, stack, drafters, rendered[0], waiting)
        for name, method in config.methods.items()
    }

    def arms_for(max_new_tokens: int, clock: Clock = time.perf_counter) -> dict[str, Arm]:
        reference = plain if config.compare_transformers else None
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos": eos, "seed": config.seed, "clock": clock}
        options |= {"sampling": config.sampling, "stops": config.stop_strings, "tokenizer": tokenizer}
        return make_arms(stack, drafters, methods, reference, **options)

    for warm_up in arms_for(min(WARM_UP_TOKENS, config.max_new_tokens)).values():
        warm_up(rendered[0])
    profilers: dict[str, Arm] = {}
    if device.type == "cuda":
        synchronized = arms_for(config.max_new_tokens, waiting)
        profilers = {name: synchronized[name] for name in methods}
    results = run_prompts(config, prompts, render, tokenizer, plain, arms_for(config.max_new_tokens), profilers)
    facts: dict[str, Any] = {
        "target": source,
        "drafter": " + ".join(name for name in (config.checkpoint, config.small_lm, config.table) if name) or "none",
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.sampling.temperature,
        "sampling": asdict(config.sampling),
    }
    reports = [
        build_report(name, results, {**facts, "settings": asdict(method)}, config.seed)
        for name, method in methods.items()
    ]
    relate_to_chain(reports)
    texts = {
        (r.prompt_id, arm): tokenizer.decode(list(g.tokens), skip_special_tokens=True)
        for r in results
        for arm, g in r.generations.items()
    }
    write_reports(out_dir, reports, results, texts)
    print(markdown(reports))
    for drafter in (config.checkpoint, config.small_lm):
        if config.card and drafter is not None and Path(drafter).is_dir():
            add_report(Path(drafter), markdown(reports))
    wrong = [report["method"] for report in reports if not is_lossless(report)]
    if wrong:
        print(f"error: not lossless: {', '.join(wrong)}; see {out_dir}/generations.jsonl", file=sys.stderr)
        sys.exit(1)


def load_plain(source: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The whole target as transformers loads it: the reference of every comparison."""
    model = AutoModelForCausalLM.from_pretrained(source, revision=revision, dtype=dtype, attn_implementation=ATTENTION)
    model.requires_grad_(False).eval()
    return model.to(device)  # type: ignore[arg-type]  # its stub is a decorator's


def heldout_fraction(config: EvaluateConfig, default: float) -> float:
    """The share of `python_stdlib` that training has not seen: the checkpoint's own, where it was trained on that."""
    if config.checkpoint is None:
        return default
    data = read_meta(config.checkpoint).training.get("data", {})
    return data["heldout_fraction"] if data.get("source") == "python_stdlib" else default


def find_target(config: EvaluateConfig) -> tuple[str, str | None]:
    """Name and revision of the target: the config's, else those the checkpoint was trained for."""
    if config.checkpoint is None:
        assert config.target is not None
        return config.target, config.revision
    trained_for = read_meta(config.checkpoint).fingerprint
    return config.target or trained_for.target, config.revision or trained_for.revision


def run_prompts(
    config: EvaluateConfig,
    prompts: Sequence[PromptLike],
    render: Render,
    tokenizer: PreTrainedTokenizerBase,
    plain: PreTrainedModel,
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
            if len(ids) + config.max_new_tokens > plain.config.max_position_embeddings:
                tqdm.write(f"skipped prompt={prompt.id} turn={number + 1} tokens={len(ids)}: beyond the context")
                break
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
            excused = frozenset() if config.sampling.temperature else excuse_ties(plain, result)
            results.append(replace(result, excused=excused))
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
                f"prompt {prompt.id}: {len(ids)} tokens, expected 1 to {limit} (the models' context less "
                "max_new_tokens); drop or shorten it"
            )

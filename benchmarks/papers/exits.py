"""Early exits of several shapes: trained alike, and told apart by what their checkpoints say (EESD, Figs. 4 and 5)."""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.base.files import require_writable, write_json
from outrider.commands import build, register
from outrider.commands.options import compose_defaults
from outrider.draft_models.early_exit.checkpoint import META_FILE, DrafterMeta, read_meta
from outrider.draft_models.targets.empty_models import decoder_layers, empty_model
from outrider.draft_models.targets.open_target import read_config
from outrider.train.recipes.early_exit import train_early_exit
from outrider.train.settings.drafters import EesdConfig
from papers.claims import Claim, Row, Table

# No step is chosen by an evaluation: a training ends with its steps.
COMMON = ["fit.epochs=null", "fit.eval_every=null", "fit.save_every=null", "fit.wandb.mode=disabled", "fit.warmup=0",
          "fit.schedule=linear", "fit.optimizer=muon", "fit.muon_lr=0.02", "fit.lr=4e-3", "fit.batch_rows=8",
          "seq_len=256", "decode_prompts=16", "decode_tokens=64", "resume=true"]  # fmt: skip
SHOWN = ("hm", "alpha_1", "tau", "per_round", "step_share", "gain_by_weights", "trained_steps", "speedup")
NEEDS = "needs --exits, or --train-steps to train them"


@dataclass(frozen=True)
class Exit:
    """A checkpoint of an early exit: where it lies, the target's layers under it, and how many it has."""

    where: str
    first: int
    depth: int
    meta: DrafterMeta


def train_exits(options: argparse.Namespace) -> list[str]:
    """Train an exit for every N with one layer, and for the first N with every depth; what is done already is kept.

    Returns where they lie. All are trained by the same data, in the same order, for the same number of steps.
    """
    folder = options.work / "exits"
    asked = {"target": options.target, "steps": options.train_steps, "told": options.train, "common": COMMON}
    made_for = require_writable(folder) / "settings.json"
    if made_for.exists() and json.loads(made_for.read_text()) != asked:
        sys.exit(f"error: {folder}: holds drafters of other settings; choose another --work")
    write_json(made_for, asked)
    first = options.first_layers[0]
    shapes = dict.fromkeys([*((n, 1) for n in options.first_layers), *((first, depth) for depth in options.depths)])
    found = []
    for n, depth in shapes:
        where = folder / f"first_{n}_exit_{depth}"
        told = [f"target={options.target}", *options.train, f"exit_layer={n}", f"exit_depth={depth}"]
        train_exit(where, [*told, f"fit.steps={options.train_steps}"])
        found.append(str(where))
    return found


def train_exit(out_dir: Path, overrides: Sequence[str]) -> None:
    """Train an early exit as train/eesd.py does, unless that is done. Of overrides of one key the last one counts."""
    if (out_dir / META_FILE).exists():
        return
    register("eesd", EesdConfig)
    given = list({one.partition("=")[0]: one for one in (*COMMON, *overrides)}.values())
    print("+ eesd", *given, f"out_dir={out_dir}", flush=True)
    with torch.enable_grad():
        train_early_exit(build(EesdConfig, compose_defaults("eesd", [*given, f"out_dir={out_dir}"])))
    gc.collect()  # what trains is part of cycles, and holds the models


def tables_of_exits(target: str | None, exits: Sequence[str], method: Any) -> dict[str, Table]:
    """Figs. 4 and 5. exits: where they lie. method: what drafts with each of them."""
    known = [Exit(where, meta.exit_layer, meta.exit_depth, meta) for where in exits for meta in [read_meta(where)]]
    firsts = sorted((one for one in known if one.depth == 1), key=lambda one: one.first)
    by_first = {n: sorted((one for one in known if one.first == n), key=lambda one: one.depth) for n in
                sorted({one.first for one in known})}  # fmt: skip
    depths = max(by_first.values(), key=len, default=[])
    return {
        "figure_4": figure(
            "Fig. 4: the number of first layers N",
            [(f"N = {one.first}", one.first, one) for one in firsts],
            ("more layers raise HM", "but not the speed", "nor the tokens that a pass's weights bring"),
            "N", target, method,
        ),
        "figure_5": figure(
            "Fig. 5: the number of exit layers",
            [(f"{one.depth} exit layer{'s' * (one.depth > 1)}", one.depth, one) for one in depths],
            ("more exit layers raise HM", "one is fastest", "one brings most tokens for the weights that are read"),
            "exit layers", target, method,
        ),
    }  # fmt: skip


def figure(
    title: str,
    exits: Sequence[tuple[str, int, Exit]],
    said: Sequence[str],
    xlabel: str,
    target: str | None,
    method: Any,
) -> Table:
    """A row for every exit; the three claims are of HM, of speed-ups and of tokens by the weights that are read."""
    if len({x for _, x, _ in exits}) < 2 or target is None:
        return Table(title, never=NEEDS)
    names = [name for name, _, _ in exits]
    rows = tuple(
        Row(name if names.count(name) == 1 else f"{name} ({Path(one.where).name})", method, other=one.where, x=x,
            facts=facts_of(one, target))
        for name, x, one in exits
    )  # fmt: skip
    up = tuple(row.name for row in rows)
    claims = tuple(
        Claim(text, quantity, terms)
        for text, quantity, terms in zip(
            said, ("hm", "speedup", "gain_by_weights"), (up, up[::-1], up[::-1]), strict=True
        )
    )
    note = "By weights: a pass of the target costs the weights that it reads, and so does a drafted token."
    return Table(title, SHOWN, rows, claims, plot="hm", xlabel=xlabel, note=note)


def facts_of(one: Exit, target: str) -> tuple[tuple[str, float], ...]:
    """The weights that a draft's step and a pass of the target read, and the steps that it was trained for."""
    config = read_config(target, role="target")
    model: Any = empty_model(config)
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(model)]
    head = model.get_output_embeddings().weight.numel()
    own = head if one.meta.draft_vocabulary is None else head * one.meta.draft_vocabulary / config.vocab_size
    step = sum(sizes[: one.first]) + one.depth * sizes[-1] + own
    known: tuple[tuple[str, float], ...] = (("step_weights", float(step)), ("pass_weights", float(sum(sizes) + head)))
    steps = one.meta.training.get("steps")
    return known if steps is None else (*known, ("trained_steps", float(steps)), ("trained_runs", 1.0))

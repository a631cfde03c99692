"""Training a calibration head: capture what real drafting came to, fit the head, say how well calibrated it is."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save
from torch import nn

from data_prep.responses.directory import SECONDS_FILE, seconds_spent
from data_prep.text.rehearsal import rehearsable
from data_prep.text.rows import load_rows
from data_prep.text.sources import Split
from draft_models.calibration.checkpoint import save_calibration
from draft_models.early_exit.checkpoint import open_target_of
from draft_models.targets.anatomy import context_limit
from draft_models.targets.open_target import OpenTarget, open_target, pick_dtype
from draft_models.targets.target import Target
from inference.core.decode import speculative
from inference.core.drafter import DraftModel
from inference.drafters.shaped import Shaped
from inference.loading.drafters import prepare
from inference.loading.memory_plan import plan_capture
from inference.loading.subject import load_stack
from inference.measure.time_limit import TimeLimit, spread_order
from inference.settings.kinds import KINDS, Kind, kind_in
from inference.settings.method import MethodConfig
from inference.shapes.factory import Chain
from inference.stopping.interface import Step
from outrider.errors import UserError
from outrider.files import require_writable, write_atomically, write_json
from outrider.processes import from_main, join_processes, only_run_of
from outrider.progress import counted
from outrider.settings import keyed
from train import run_dir
from train.calibration_model import EXAMPLES, CalibrationModel, Examples
from train.calibration_scores import Batch, brier, judge, later_half, plot_reliability, predict, temper
from train.fit import fit
from train.settings import CalibrateConfig
from train.watch import heldout_prompt

SHARD_PROMPTS = 8


@rehearsable
def calibrate(config: CalibrateConfig) -> None:
    """Capture, fit, report, and store the head in `config.checkpoint`.

    Raises `UserError` before a target is loaded when checkpoint, target or directory are unusable.
    """
    kind = kind_to_calibrate(config)
    if config.plan:
        target = find_target(config, kind).config
        positions = min(config.seq_len + config.new_tokens, context_limit(target))
        print(plan_capture(config, kind, config.checkpoint, target, positions), flush=True)
        return
    with ExitStack() as held:
        state = join_processes()
        digest = kind.load_maker().reading(config.reading).digest(config.checkpoint)  # before anything is made there
        for folder in {Path(path).resolve(): path for path in (config.out_dir, config.checkpoint)}.values():
            held.enter_context(only_run_of(state, require_writable(folder), "a training"))
        _calibrate(config, kind, digest, state)


def kind_to_calibrate(config: CalibrateConfig) -> Kind:
    """The kind of drafter in `config.checkpoint`. Raises `UserError` where it is none that a head can read."""
    kind = kind_in(config.checkpoint)
    if kind is None or kind.calibration is None:
        known = ", ".join(f"{one.name} ({one.file})" for one in KINDS.values() if one.calibration is not None)
        found = "no drafter there" if kind is None else f"{kind.name} has no hidden states that a head could read"
        raise UserError(
            f"checkpoint={config.checkpoint}: {found}; expected the directory of one of {known}. Fetch one that is on "
            "the Hub: hf download NAME --local-dir FOLDER"
        )
    if kind != KINDS["eagle3"] and config.reading.stated():
        raise UserError(f"{config.reading}: expected nothing where checkpoint={config.checkpoint} is no EAGLE-3 head")
    if kind != KINDS["early_exit"] and config.target is None:
        raise UserError(
            f"target=null: expected the model that the {kind.name} in checkpoint={config.checkpoint} is for"
        )
    return kind


def find_target(config: CalibrateConfig, kind: Kind) -> OpenTarget:
    """The target of `config`; an early exit knows its own. Raises `UserError`."""
    if kind == KINDS["early_exit"]:
        return open_target_of(config.checkpoint, config.target, config.revision)
    assert config.target is not None
    return open_target(config.target, config.revision, by_layers=kind.layers)


def _calibrate(config: CalibrateConfig, kind: Kind, digest: str, state: PartialState) -> None:
    out_dir = Path(config.out_dir)
    run_dir.require_free(out_dir, config.resume)
    maker, target = kind.load_maker().reading(config.reading), find_target(config, kind)
    tokenizer = target.tokenizer
    dtype = pick_dtype(config.dtype, target.config, state.device)
    fingerprint = from_main(state, lambda: target.fingerprint)
    model = maker.load(config.checkpoint, target, {}, dtype=dtype, device=state.device)

    @functools.cache
    def stack() -> Target:  # only where something is left to capture
        whole = load_stack(target, None, dtype, state.device, by_layers=kind.layers)
        prepare(whole, {kind.name: model})
        return whole

    def draft_model() -> DraftModel:
        return maker.draft_model(model, MethodConfig(kind.name))

    target_model = {"config": fingerprint.config, "tensors": fingerprint.tensors}
    decided = keyed(config, ("dtype", "new_tokens", "max_draft"))
    settings = {key: value for key, value in decided.items() if key not in ("fit", "l2")} | {
        "drafter": digest,
        "target": _digest(target_model),
        "dtype": str(dtype),
        "shard_prompts": SHARD_PROMPTS,
        "whole": True,  # rounds of held-out text
    }
    context = min(filter(None, (context_limit(target.config), maker.context(model))))
    room = min(config.seq_len, context - config.new_tokens)
    if room < 1:
        raise UserError(f"new_tokens={config.new_tokens}: expected less than the context of {context} tokens")
    begun = bool(run_dir.checkpoints(out_dir))  # what is learned from is decided
    captured: dict[str, Batch] = {}
    counts: dict[Split, int] = {"train": config.prompts, "heldout": config.heldout_prompts}
    minutes, texts = config.minutes, sum(counts.values())  # what is left of both
    for split, count in counts.items():
        rows = load_rows(config.data, tokenizer, config.seq_len, split, max_rows=count)
        prompts = [heldout_prompt(rows[i])[-room:] for i in range(len(rows))]
        folder = require_writable(out_dir / "captured" / f"{split}-{_digest([settings, prompts])}")
        limit = TimeLimit(minutes and minutes * count / texts)
        starts = range(0, len(prompts), SHARD_PROMPTS)
        there = [start for start in starts if _shard(folder, start).exists()]
        state.wait_for_everyone()  # nobody adds to them before all have looked
        if begun and there:
            if len(there) < len(starts) and state.is_main_process:
                said = "goes on with the texts that it learns from; for more another out_dir"
                print(f"calibrate split={split}: {said}", flush=True)
        else:
            capture_shards(config, folder, prompts, stack, draft_model, state, limit, whole=split == "heldout")
            state.wait_for_everyone()
            there = [start for start in starts if limit.minutes is None or _shard(folder, start).exists()]
            if limit.minutes is not None and len(there) < len(starts) and state.is_main_process:
                # What is learned from is known by it: a resumed run is to find its time over too.
                write_json(folder / SECONDS_FILE, {"seconds": max(seconds_spent(folder), 60 * limit.minutes)})
        shards = [load_file(_shard(folder, start)) for start in there]
        captured[split] = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
        minutes, texts = minutes and max(0.0, minutes - seconds_spent(folder) / 60), texts - count

    heldout = {name: value.to(state.device) for name, value in only_tested(captured["heldout"]).items()}

    def evaluate(fitted: nn.Module, _: int) -> dict[str, float]:
        assert isinstance(fitted, CalibrationModel)
        return {"brier": brier(predict(fitted.folded(), heldout), heldout["label"])}

    learner = CalibrationModel(captured["train"], config.l2)
    recipe = {"capture": settings, "l2": config.l2, "examples": len(captured["train"]["label"])}
    identity = {**recipe, "labels": _digest(captured["train"]["label"].tolist())}
    result = fit(
        learner, Examples(captured["train"]), config.fit, out_dir, resume=config.resume, identity=identity,
        settings=config, evaluate=evaluate,
    )  # fmt: skip
    if state.is_main_process:
        head = learner.cpu().folded()
        survival = temper(head, captured["heldout"])
        judged = judge(head, captured["train"], only_tested(later_half(captured["heldout"])))
        judged["survival"] = survival
        write_json(out_dir / "calibration.json", judged)
        write_atomically(out_dir / "reliability.png", plot_reliability(judged))
        facts = {**recipe, "data": config.data.source, "fit": asdict(config.fit), "steps": result.steps}
        facts |= {"target": target_model}
        folder = require_writable(Path(config.checkpoint) / str(kind.calibration))
        save_calibration(folder, head, digest, {**facts, "heldout": judged})
        for name, row in judged["predictors"].items():
            print(f"calibration predictor={name} brier={row['brier']:.4f} ece={row['ece']:.4f}", flush=True)
        errors = f"ece_before={survival['ece_before']:.4f} ece_after={survival['ece_after']:.4f}"
        print(f"calibration survival {errors} temperatures={'kept' if survival['kept'] else 'none'}", flush=True)
        print(f"saved calibration={folder} examples={recipe['examples']}", flush=True)
    state.wait_for_everyone()


def capture_shards(
    config: CalibrateConfig,
    folder: Path,
    prompts: Sequence[list[int]],
    stack: Callable[[], Target],
    draft_model: Callable[[], DraftModel],
    state: PartialState,
    limit: TimeLimit,
    whole: bool = False,
) -> None:
    """Leave in `folder` this process's shards of what `capture` makes of `prompts`, those that are there already kept.

    When the time of `limit` is over the texts that are left are left out. What there is by then is of texts spread over
    all, and of the first shard as much as makes a row of `Examples`. The seconds taken are kept too, so a resumed run
    has no more time.
    """

    def is_over() -> bool:
        return limit.is_over(limit.spent())

    limit = replace(limit, earlier=seconds_spent(folder))
    left = own_shards(folder, len(prompts), state.process_index, state.num_processes)
    mine = [start for start in left if start == 0 or not limit.is_over(limit.earlier)]
    if mine:
        stack()  # loading takes none of the time
    limit = replace(limit, started=limit.clock())
    most = None if limit.minutes is None else 60 * limit.minutes - limit.earlier
    for start in counted(mine, "continuing texts", f"shards of {SHARD_PROMPTS}", most=most):
        if start > 0 and is_over():
            break
        texts = prompts[start : start + SHARD_PROMPTS]
        shard = capture(stack(), draft_model, texts, config.new_tokens, config.max_draft, whole, is_over)
        write_atomically(_shard(folder, start), save(shard))
        if state.is_main_process:
            write_json(folder / SECONDS_FILE, {"seconds": limit.spent()})


def own_shards(folder: Path, prompts: int, process: int, processes: int) -> list[int]:
    """First prompts of the shards that are `process`'s to capture and missing in `folder`, in the order of capture.

    Whose a shard is does not depend on what is there: the processes look at different times. The first of them are
    spread over all.
    """
    starts = [SHARD_PROMPTS * index for index in spread_order(-(-prompts // SHARD_PROMPTS))[process::processes]]
    return [start for start in starts if not _shard(folder, start).exists()]


class Recorder:
    """A stop rule that never stops early and keeps what the head will see, with the outcome of every tested token.

    Tested are the accepted tokens and the first rejected one; nobody has asked the target about the others. whole: keep
    those too, with the label 0.
    """

    def __init__(self, max_draft: int, whole: bool = False):
        self.max_draft = max_draft
        self.whole = whole
        self._round: list[Batch] = []
        self.kept: list[Batch] = []

    def stop(self, step: Step) -> bool:
        self._round.append(
            {
                "target_hidden": step.source.target_hidden,
                "draft_hidden": step.hidden,
                "position": torch.tensor([step.drafted]),
                "confidence": step.log_probability.exp(),
            }
        )
        return step.drafted >= self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        for place, example in enumerate(self._round[: drafted if self.whole else min(accepted + 1, drafted)]):
            self.kept.append({**example, "label": torch.tensor([float(place < accepted)])})
        self._round.clear()


def capture(
    stack: Target,
    draft_model: Callable[[], DraftModel],
    prompts: Sequence[list[int]],
    new_tokens: int,
    max_draft: int,
    whole: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> Batch:
    """Continue `prompts` greedily, drafting `max_draft` tokens a round, and keep every tested token; whole: every one.

    draft_model: makes one, fresh for a generation. is_over: whether to leave out the prompts that are left, once there
    are tokens for a row of `Examples`.

    Returns target_hidden [n, d_T], draft_hidden [n, d_D] in the model's dtype, and position (from 1), confidence (q of
    the token) and label (1: it was the target's), each [n].
    """
    recorder = Recorder(max_draft, whole)
    for prompt in counted(prompts, "shard", "texts"):
        for _ in speculative(stack, Shaped(draft_model(), Chain(recorder)), prompt, max_new_tokens=new_tokens):
            pass
        if len(recorder.kept) >= EXAMPLES and is_over():
            break
    names = ("target_hidden", "draft_hidden", "position", "confidence", "label")
    return {name: torch.cat([example[name].cpu() for example in recorder.kept]) for name in names}


def only_tested(captured: Batch) -> Batch:
    """Of whole rounds the tokens that were put to the test: the first of each, and those after an accepted one."""
    position, label = captured["position"], captured["label"]
    kept = (position == 1) | (label.roll(1) == 1)
    return {name: value[kept] for name, value in captured.items()}


def _shard(folder: Path, start: int) -> Path:
    return folder / f"{start:06d}.safetensors"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

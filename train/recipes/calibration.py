"""A calibration head is trained on what the drafts of a drafter came to (EESD §3.3).

The training step is `CalibrationModel` (train/parts/calibration_model.py).
"""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import PartialState

from data_prep.text.rehearsal import rehearsable
from data_prep.text.rows import load_rows
from data_prep.text.sources import Split
from draft_models.calibration.checkpoint import save_calibration
from draft_models.calibration.head import CalibrationHead
from draft_models.early_exit.checkpoint import open_target_of
from draft_models.targets.anatomy import context_limit
from draft_models.targets.open_target import OpenTarget, open_target, pick_dtype
from draft_models.targets.target import Target
from inference.loading.drafters import prepare
from inference.loading.memory_plan import plan_capture
from inference.loading.subject import load_stack
from inference.settings.kinds import KINDS, Kind, kind_in
from inference.settings.method import MethodConfig
from outrider.errors import UserError
from outrider.files import require_writable, write_atomically, write_json
from outrider.processes import from_main, join_processes
from outrider.settings import keyed
from train.core.driver import run_training
from train.core.training import Metrics, Trained, Training
from train.parts.calibration_model import CalibrationModel, Examples
from train.parts.calibration_scores import Batch, brier, judge, later_half, plot_reliability, predict, temper
from train.parts.capture import SHARD_PROMPTS, Drafting, capture_splits, digest_of, only_tested
from train.parts.heldout import heldout_prompt
from train.settings.drafters import CalibrateConfig


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
    join_processes()
    digest = kind.load_maker().reading(config.reading).digest(config.checkpoint)  # before anything is made there
    run_training(config, Recipe(config, kind, digest).prepare, config.checkpoint)


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


@dataclass(frozen=True)
class Recipe:
    """The head of a drafter of this kind, which `digest` knows."""

    config: CalibrateConfig
    kind: Kind
    digest: str

    def prepare(self, state: PartialState) -> Training[CalibrationModel]:
        """Its training, on what is captured at first. Raises `UserError`."""
        config, target = self.config, find_target(self.config, self.kind)
        dtype = pick_dtype(config.dtype, target.config, state.device)
        fingerprint = from_main(state, lambda: target.fingerprint)
        known = {"config": fingerprint.config, "tensors": fingerprint.tensors}
        maker = self.kind.load_maker().reading(config.reading)
        model = maker.load(config.checkpoint, target, {}, dtype=dtype, device=state.device)

        @functools.cache
        def stack() -> Target:  # only where something is left to capture
            whole = load_stack(target, None, dtype, state.device, by_layers=self.kind.layers)
            prepare(whole, {self.kind.name: model})
            return whole

        drafting = Drafting(stack, lambda: maker.draft_model(model, MethodConfig(self.kind.name)))
        settings = self._settings(digest_of(known), str(dtype))
        room = self._room(target, maker.context(model))

        def prompts_of(split: Split, count: int) -> list[list[int]]:
            rows = load_rows(config.data, target.tokenizer, config.seq_len, split, max_rows=count)
            return [heldout_prompt(rows[i])[-room:] for i in range(len(rows))]

        captured = capture_splits(config, settings, prompts_of, drafting, state)
        heldout = {name: value.to(state.device) for name, value in only_tested(captured["heldout"]).items()}
        student = CalibrationModel(captured["train"], config.l2)
        recipe = {"capture": settings, "l2": config.l2, "examples": len(captured["train"]["label"])}
        identity = {**recipe, "labels": digest_of(captured["train"]["label"].tolist())}

        def evaluate(fitted: CalibrationModel, _: int) -> Metrics:
            return {"brier": brier(predict(fitted.folded(), heldout), heldout["label"])}

        def save(trained: Trained) -> None:
            made = {**recipe, "data": config.data.source, "fit": asdict(config.fit), "steps": trained.result.steps}
            self._save(student.cpu().folded(), captured, {**made, "target": known})

        return Training(student, Examples(captured["train"]), config.fit, identity, evaluate, save)

    def _settings(self, target: str, dtype: str) -> dict[str, object]:
        """What decides what is captured of a text. target: its digest."""
        decided = keyed(self.config, ("dtype", "new_tokens", "max_draft"))
        return {key: value for key, value in decided.items() if key not in ("fit", "l2")} | {
            "drafter": self.digest,
            "target": target,
            "dtype": dtype,
            "shard_prompts": SHARD_PROMPTS,
            "whole": True,  # rounds of held-out text
        }

    def _room(self, target: OpenTarget, drafter_context: int | None) -> int:
        """The longest text that is continued, in tokens. Raises `UserError` where there is none."""
        context = min(filter(None, (context_limit(target.config), drafter_context)))
        room = min(self.config.seq_len, context - self.config.new_tokens)
        if room < 1:
            raise UserError(f"new_tokens={self.config.new_tokens}: expected less than the context of {context} tokens")
        return room

    def _save(self, head: CalibrationHead, captured: Mapping[Split, Batch], made: Mapping[str, object]) -> None:
        """Give the head its temperatures, write how good it is, and store it beside its drafter."""
        out_dir = Path(self.config.out_dir)
        survival = temper(head, captured["heldout"])
        scores = judge(head, captured["train"], only_tested(later_half(captured["heldout"])))
        judged = {**scores, "survival": survival}
        write_json(out_dir / "calibration.json", judged)
        write_atomically(out_dir / "reliability.png", plot_reliability(scores))
        folder = require_writable(Path(self.config.checkpoint) / str(self.kind.calibration))
        save_calibration(folder, head, self.digest, {**made, "heldout": judged})
        for name, row in scores["predictors"].items():
            print(f"calibration predictor={name} brier={row['brier']:.4f} ece={row['ece']:.4f}", flush=True)
        errors = f"ece_before={survival['ece_before']:.4f} ece_after={survival['ece_after']:.4f}"
        print(f"calibration survival {errors} temperatures={'kept' if survival['kept'] else 'none'}", flush=True)
        print(f"saved calibration={folder} examples={made['examples']}", flush=True)

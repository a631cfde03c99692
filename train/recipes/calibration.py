"""Recipe for calibration heads: trained on the outcomes of a drafter's drafts (EESD §3.3).

The training step is `CalibrationModel` (train/parts/calibration_model.py).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from accelerate import PartialState
from torch import nn

from data_prep.text.rehearsal import rehearsable
from data_prep.text.settings import DataConfig
from data_prep.text.sources import Split
from draft_models.calibration import save_calibration
from draft_models.calibration_head import CalibrationHead
from draft_models.early_exit.checkpoint import open_target_of, read_meta
from draft_models.targets.model_spec import context_limit
from draft_models.targets.open_target import OpenTarget, open_target, pick_dtype
from inference.core.decode import speculative
from inference.core.rounds import Round
from inference.drafters.shaped import ModelDrafterPlugin
from inference.engines.packing import lay_out
from inference.loading.memory_plan import plan_capture
from inference.loading.targets import end_tokens, load_stack, prepare
from inference.loading.templates import templates_of
from inference.measure.replay import FirstLayersSession, RecordedSession, replay
from inference.settings.kinds import KINDS, Kind, kind_in
from inference.settings.method import MethodConfig
from outrider.errors import UserError, warn
from outrider.files import require_writable, write_atomically, write_json
from outrider.processes import from_main, join_processes, say
from train.core.driver import run_training
from train.core.training import Metrics, Trained, Training
from train.parts.calibration_model import CalibrationModel, Examples
from train.parts.calibration_scores import Batch, brier, judge, later_half, plot_reliability, predict, temper
from train.parts.capture import SHARD_PROMPTS, Drafting, Text, capture_splits, digest_of, only_tested
from train.parts.heldout import heldout_prompt
from train.parts.recorded_answers import recorded_text, require_answers_of
from train.parts.top_k_rows import load_taught_rows
from train.settings.drafters import CalibrateConfig


@rehearsable
def calibrate(config: CalibrateConfig) -> None:
    """Capture, fit, report, and store the head in `config.checkpoint`.

    Raises `UserError` before the target is loaded if checkpoint, target or directory are unusable.
    """
    kind = kind_to_calibrate(config)
    if config.plan:
        target = find_target(config, kind).config
        positions = min(config.seq_len + config.new_tokens, context_limit(target))
        print(plan_capture(config, kind, config.checkpoint, target, positions, _layers_read(config, kind)), flush=True)
        return
    join_processes()
    config = with_its_heldout(config, kind)
    digest = kind.load_plugin().reading(config.reading).digest(config.checkpoint)  # before anything is written there
    run_training(config, Recipe(config, kind, digest).prepare, config.checkpoint)


def kind_to_calibrate(config: CalibrateConfig) -> Kind:
    """The kind of drafter in `config.checkpoint`. Raises `UserError` if a calibration head cannot read that kind."""
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
    if kind == KINDS["eagle3"] and config.answers == "recorded":
        raise UserError("answers=recorded: expected target, as an EAGLE-3 head reads nearly all layers of the target")
    if kind != KINDS["early_exit"] and config.target is None:
        raise UserError(
            f"target=null: expected the model that the {kind.name} in checkpoint={config.checkpoint} is for"
        )
    return kind


def with_its_heldout(config: CalibrateConfig, kind: Kind) -> CalibrateConfig:
    """`config` with the held-out share that is recorded of the drafter's training: what it learned from tells nothing.

    Another share than the default was given on purpose; it is kept, with a warning.
    """
    data = kind.load_plugin().reading(config.reading).data_of(config.checkpoint) or {}
    recorded, given = data.get("heldout_fraction"), config.data.heldout_fraction
    if not isinstance(recorded, float) or not 0 < recorded < 1 or recorded == given:
        return config
    kept = given != DataConfig.heldout_fraction
    said = f"data.heldout_fraction={recorded:g} in the training of {config.checkpoint}"
    (warn if kept else say)(f"{said}, {given:g} here" if kept else f"{said}, taken over")
    return config if kept else replace(config, data=replace(config.data, heldout_fraction=recorded))


def _layers_read(config: CalibrateConfig, kind: Kind) -> int | None:
    """How many of the target's first layers are read; None: the whole target."""
    if config.answers == "target":
        return None
    return read_meta(config.checkpoint).exit_layer if kind == KINDS["early_exit"] else 0


def find_target(config: CalibrateConfig, kind: Kind) -> OpenTarget:
    """The target of `config`; the checkpoint of an early exit names its target. Raises `UserError`."""
    if kind == KINDS["early_exit"]:
        return open_target_of(config.checkpoint, config.target, config.revision)
    assert config.target is not None
    return open_target(config.target, config.revision, by_layers=kind.layers)


@dataclass(frozen=True)
class Recipe:
    """A calibration head for a drafter of this kind. digest: identifies the drafter."""

    config: CalibrateConfig
    kind: Kind
    digest: str

    def prepare(self, state: PartialState) -> Training[CalibrationModel]:
        """The training, on examples that this captures first. Raises `UserError`."""
        config, target = self.config, find_target(self.config, self.kind)
        recorded = config.answers == "recorded"
        if recorded:
            require_answers_of(target, config.data)
        dtype = pick_dtype(config.dtype, target.config, state.device)
        fingerprint = from_main(state, lambda: target.fingerprint)
        known = {"config": fingerprint.config, "tensors": fingerprint.tensors}
        plugin = self.kind.load_plugin().reading(config.reading)
        learned = templates_of(plugin.data_of(config.checkpoint), target.tokenizer)
        if learned and (other := templates_of(config.data.deciding(), target.tokenizer) - learned):
            told = " and ".join(sorted(learned))
            warn(f"data.template={' and '.join(sorted(other))}: the drafter in {config.checkpoint} learned by {told}")
        model = plugin.load(config.checkpoint, target, {}, dtype=dtype, device=state.device)

        assert isinstance(plugin, ModelDrafterPlugin)  # each kind that has a head
        draft_model = partial(plugin.draft_model, model, MethodConfig(self.kind.name))

        @cache
        def load() -> Callable[..., Iterator[Round]]:  # only where something is left to capture
            return self._load(target, model, dtype, state.device)

        drafting = Drafting(load, draft_model, config.new_tokens, end_tokens(target))
        settings = self._settings(digest_of(known), str(dtype), drafting.ends)
        room = self._room(target, plugin.context(model))

        def texts_of(split: Split, count: int) -> list[Text]:
            given = config.data, target.tokenizer, config.seq_len, split
            rows = load_taught_rows(*given, cached=recorded, max_rows=count)
            if not recorded:
                return [Text(heldout_prompt(rows[index])[-room:]) for index in range(len(rows))]
            texts = [text for index in range(len(rows)) if (text := recorded_text(rows[index])) is not None]
            say(f"calibrate split={split} answers={len(texts)} not_greedy={len(rows) - len(texts)}")
            return [text for text in texts if len(text.prompt) <= room]

        captured = capture_splits(config, settings, texts_of, drafting, state)
        heldout = {name: value.to(state.device) for name, value in only_tested(captured["heldout"]).items()}
        student = CalibrationModel(captured["train"], config.l2, odds=config.odds)
        recipe = {"capture": settings, "l2": config.l2, "examples": len(captured["train"]["label"])}
        identity = {**recipe, "labels": digest_of(captured["train"]["label"].tolist())}
        identity |= {} if config.odds else {"odds": False}

        def evaluate(fitted: CalibrationModel, _: int) -> Metrics:
            return {"brier": brier(predict(fitted.folded(), heldout), heldout["label"])}

        def save(trained: Trained) -> None:
            made = {**recipe, "odds": config.odds, "data": config.data.source, "fit": asdict(config.fit)}
            made |= {"steps": trained.result.steps}
            self._save(student.cpu().folded(), captured, {**made, "target": known})

        return Training(student, Examples(captured["train"]), config.fit, identity, evaluate, save)

    def _load(
        self, target: OpenTarget, model: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> Callable[..., Iterator[Round]]:
        """See `Drafting.load`; the drafter `model` is made ready too."""
        layers = _layers_read(self.config, self.kind)
        if layers == 0:
            lay_out(model, device)
            sizes = {"vocabulary": target.config.vocab_size, "width": target.config.hidden_size}
            return partial(replay, session=partial(RecordedSession, **sizes, device=device))
        if layers is None:
            whole = load_stack(target, None, dtype, device, by_layers=self.kind.layers)
            prepare(whole, {self.kind.name: model})
            return partial(speculative, whole)
        first = target.stack(range(layers), dtype=dtype, device=device)
        prepare(first, {self.kind.name: model})
        return partial(replay, session=partial(FirstLayersSession, first))

    def _settings(self, target: str, dtype: str, ends: Collection[int]) -> dict[str, object]:
        """What decides what is captured of a text. target: its digest. ends: the tokens that end a text."""
        decided = self.config.deciding().items()
        return {key: value for key, value in decided if key not in ("fit", "l2", "odds")} | {
            "drafter": self.digest,
            "target": target,
            "dtype": dtype,
            "shard_prompts": SHARD_PROMPTS,
            "whole": True,  # whole rounds are kept of held-out text
            **({"ends": sorted(ends)} if ends else {}),
        }

    def _room(self, target: OpenTarget, drafter_context: int | None) -> int:
        """The longest prompt that can be continued, in tokens. Raises `UserError` if that is less than one."""
        context = min(filter(None, (context_limit(target.config), drafter_context)))
        room = min(self.config.seq_len, context - self.config.new_tokens)
        if room < 1:
            raise UserError(f"new_tokens={self.config.new_tokens}: expected less than the context of {context} tokens")
        return room

    def _save(self, head: CalibrationHead, captured: Mapping[Split, Batch], made: Mapping[str, object]) -> None:
        """Fit the head's temperatures, write its scores, and store it with its drafter."""
        out_dir = Path(self.config.out_dir)
        survival = temper(head, captured["heldout"], keep=self.config.odds)
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

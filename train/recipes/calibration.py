"""Recipe for calibration heads: trained on the outcomes of a drafter's drafts (EESD §3.3).

The examples are captured first (train/parts/capture.py). The training step is `CalibrationModel.forward`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.base.errors import UserError, warn
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.base.processes import from_main, join_processes, say
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import Split
from outrider.draft_models.calibration import save_calibration
from outrider.draft_models.calibration_head import CalibrationHead, log_odds
from outrider.draft_models.early_exit.checkpoint import open_target_of, read_meta
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget, open_target, pick_dtype
from outrider.inference.core.decode import speculative
from outrider.inference.core.rounds import Round
from outrider.inference.drafters.shaped import ModelDrafterPlugin
from outrider.inference.engines.packing import lay_out
from outrider.inference.loading.memory_plan import (
    Held,
    Place,
    describe,
    drafter_memory,
    dtype_of,
    explained,
    planned_device,
    target_memory,
)
from outrider.inference.loading.rehearsal import rehearsable
from outrider.inference.loading.targets import end_tokens, load_stack, position_limits
from outrider.inference.loading.targets import prepare as prepare_drafters
from outrider.inference.loading.templates import templates_of
from outrider.inference.measure.replay import FirstLayersSession, RecordedSession, replay
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.settings.kinds import EAGLE3, EARLY_EXIT, KINDS, Kind, kind_in
from outrider.inference.settings.method import MethodConfig
from outrider.train.core.driver import run_training
from outrider.train.core.training import Batch, Metrics, Trained, Training
from outrider.train.parts.calibration_scores import brier, judge, later_half, plot_reliability, predict, temper
from outrider.train.parts.capture import (
    EXAMPLES,
    Drafting,
    Text,
    capture_splits,
    digest_of,
    only_tested,
    recorded_text,
    require_answers_of,
)
from outrider.train.parts.heldout import heldout_prompt
from outrider.train.parts.top_k_rows import load_taught_rows
from outrider.train.settings.drafters import CalibrateConfig


@rehearsable
def calibrate(config: CalibrateConfig) -> None:
    """Capture, fit, report, and store the head in `config.checkpoint`.

    Raises `UserError` before the target is loaded if checkpoint, target or directory are unusable.
    """
    kind = kind_to_calibrate(config)
    if config.plan:
        target, device = find_target(config, kind).config, planned_device()
        facts = {"positions": _positions(config, target), "dtype": dtype_of(config.dtype, target, device)}
        print(describe(memory_of(config, kind), device, **facts), flush=True)
        return
    join_processes()
    config = with_its_heldout(config, kind)
    digest = kind.load_plugin().reading(config.reading).digest(config.checkpoint)  # before anything is written there
    with explained(lambda: memory_of(config, kind)):
        run_training(config, partial(prepare, config, kind, digest), config.checkpoint)


def memory_of(config: CalibrateConfig, kind: Kind) -> list[Held]:
    """Of each device while the head's training data is captured."""
    target = find_target(config, kind).config
    place = Place.of(config.dtype, target, _positions(config, target), planned_device())
    plugin = kind.load_plugin().reading(config.reading)
    held = target_memory(target, place, layers_read(config, kind))
    return held + drafter_memory(kind, plugin, config.checkpoint, target, place)


def _positions(config: CalibrateConfig, target: PreTrainedConfig) -> int:
    """The tokens of the longest text."""
    return min(config.seq_len + config.new_tokens, context_limit(target))


def prepare(config: CalibrateConfig, kind: Kind, digest: str, state: PartialState) -> "Training[CalibrationModel]":
    """The training, on examples that this captures first. digest: identifies the drafter. Raises `UserError`."""
    target = find_target(config, kind)
    if config.answers == "recorded":
        require_answers_of(target, config.data)
    plugin = kind.load_plugin().reading(config.reading)
    assert isinstance(plugin, ModelDrafterPlugin)  # each kind that has a head
    warn_of_template(config, plugin.trained(config.checkpoint).data, target)
    fingerprint = from_main(state, lambda: target.fingerprint)
    known = {"config": fingerprint.config, "tensors": fingerprint.tensors}
    dtype, ends = pick_dtype(config.dtype, target.config, state.device), end_tokens(target)
    model = plugin.load(config.checkpoint, target, {}, dtype=dtype, device=state.device)

    def load() -> Drafting:
        decode = load_decoder(config, kind, target, model, dtype, state.device)
        draft_model = partial(plugin.draft_model, model, MethodConfig(kind.name))
        return Drafting(decode, draft_model, config.new_tokens, config.max_draft, ends)

    settings = {name: value for name, value in config.deciding().items() if name not in ("fit", "l2", "odds")}
    settings |= {"drafter": digest, "target": digest_of(known), "dtype": str(dtype), "ends": sorted(ends)}
    texts = texts_of(config, target, longest_prompt(config, target, position_limits({kind.name: model})))
    captured = capture_splits(Path(config.out_dir), settings, texts, load, TimeLimit(config.minutes), state)
    learned, heldout = captured["train"], only_tested(captured["heldout"])
    heldout = {name: value.to(state.device) for name, value in heldout.items()}
    student = CalibrationModel(learned, config.l2, odds=config.odds)
    recipe = {"capture": settings, "l2": config.l2, "odds": config.odds, "examples": len(learned["label"])}

    def evaluate(fitted: CalibrationModel, _: int) -> Metrics:
        return {"brier": brier(predict(fitted.folded(), heldout), heldout["label"])}

    def save(trained: Trained) -> None:
        made = {**recipe, "data": config.data.source, "fit": asdict(config.fit), "steps": trained.result.steps}
        save_head(config, kind, digest, student.cpu().folded(), captured, {**made, "target": known})

    identity = {**recipe, "labels": digest_of(learned["label"].tolist())}
    return Training(student, Examples(learned), config.fit, identity, evaluate, save)


class Examples:
    """Captured tokens as rows of `EXAMPLES` for `fit`; the last row is padded with tokens labelled IGNORE."""

    def __init__(self, captured: Batch):
        self.captured = captured

    def __len__(self) -> int:
        return -(-len(self.captured["label"]) // EXAMPLES)

    def __getitem__(self, index: int) -> Batch:
        part = {name: value[index * EXAMPLES : (index + 1) * EXAMPLES] for name, value in self.captured.items()}
        part = {name: part[name] for name in ("target_hidden", "draft_hidden", "position", "confidence", "label")}
        missing = EXAMPLES - len(part["label"])
        row = {name: nn.functional.pad(v, (0, 0) * (v.ndim - 1) + (0, missing)) for name, v in part.items()}
        labels = row.pop("label").long()
        labels[EXAMPLES - missing :] = IGNORE
        return {**row, "labels": labels}


class CalibrationModel(nn.Module):
    """The head on standardised inputs, so that one learning rate fits every model; see `folded`.

    It is initialised to the draft's own odds, shifted to the mean acceptance, so that few steps are enough.
    odds=False: these stay without weight, as in the paper.
    """

    mean_target: Tensor
    mean_draft: Tensor
    scale_target: Tensor
    scale_draft: Tensor
    mean_odds: Tensor
    scale_odds: Tensor

    def __init__(self, captured: Batch, l2: float, *, odds: bool = True):
        super().__init__()
        self.l2 = l2 / len(captured["label"])
        seen = log_odds(captured["confidence"].log())
        self.register_buffer("mean_odds", seen.mean(), persistent=False)
        self.register_buffer("scale_odds", seen.std().clamp_min(1e-6), persistent=False)
        for name in ("target", "draft"):
            values = captured[f"{name}_hidden"].float()
            self.register_buffer(f"mean_{name}", values.mean(0), persistent=False)
            self.register_buffer(f"scale_{name}", values.std(0).clamp_min(1e-6), persistent=False)
        self.head = CalibrationHead(self.mean_target.shape[0], self.mean_draft.shape[0])
        accepted = captured["label"].float().mean().clamp(0.01, 0.99)
        nn.init.constant_(self.head.bias, float(accepted.logit()))
        nn.init.constant_(self.head.odds, float(self.scale_odds) if odds else 0.0)
        self.head.odds.requires_grad_(odds)

    def forward(
        self, target_hidden: Tensor, draft_hidden: Tensor, position: Tensor, confidence: Tensor, labels: Tensor
    ) -> Batch:
        """{"loss_sum"} over labels that are not IGNORE: binary cross-entropy, plus each label's share of
        l2 · ‖weights‖². A convex problem.

        Inputs are rows of `Examples`. There are thousands of weights and only thousands of tokens, so a head without l2
        is overconfident. The weight of the draft's own odds is not penalised.
        """
        keep = labels != IGNORE
        target = (target_hidden[keep].float() - self.mean_target) / self.scale_target
        draft = (draft_hidden[keep].float() - self.mean_draft) / self.scale_draft
        odds = (log_odds(confidence[keep].log()) - self.mean_odds) / self.scale_odds
        logits = self.head.weigh(target, draft, position[keep], odds)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[keep].float(), reduction="sum")
        penalty = self.head.target.square().sum() + self.head.draft.square().sum()
        return {"loss_sum": loss + self.l2 * len(logits) * penalty}

    @torch.no_grad()
    def folded(self) -> CalibrationHead:
        """The same head for raw inputs: the standardisation is folded into its weights."""
        plain = CalibrationHead(self.mean_target.shape[0], self.mean_draft.shape[0]).to(self.mean_target.device)
        plain.target.copy_(self.head.target / self.scale_target)
        plain.draft.copy_(self.head.draft / self.scale_draft)
        plain.odds.copy_(self.head.odds / self.scale_odds)
        shift = plain.target @ self.mean_target + plain.draft @ self.mean_draft + plain.odds * self.mean_odds
        plain.bias.copy_(self.head.bias - shift)
        return plain.requires_grad_(False)


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
    if kind != EAGLE3 and config.reading.stated():
        raise UserError(f"{config.reading}: expected nothing where checkpoint={config.checkpoint} is no EAGLE-3 head")
    if kind == EAGLE3 and config.answers == "recorded":
        raise UserError("answers=recorded: expected target, as an EAGLE-3 head reads nearly all layers of the target")
    if kind != EARLY_EXIT and config.target is None:
        raise UserError(
            f"target=null: expected the model that the {kind.name} in checkpoint={config.checkpoint} is for"
        )
    return kind


def with_its_heldout(config: CalibrateConfig, kind: Kind) -> CalibrateConfig:
    """`config` with the held-out share that is recorded of the drafter's training: what it learned from tells nothing.

    Another share than the default was given on purpose; it is kept, with a warning.
    """
    data = kind.load_plugin().reading(config.reading).trained(config.checkpoint).data or {}
    recorded, given = data.get("heldout_fraction"), config.data.heldout_fraction
    if not isinstance(recorded, float) or not 0 < recorded < 1 or recorded == given:
        return config
    kept = given != DataConfig.heldout_fraction
    said = f"data.heldout_fraction={recorded:g} in the training of {config.checkpoint}"
    (warn if kept else say)(f"{said}, {given:g} here" if kept else f"{said}, taken over")
    return config if kept else replace(config, data=replace(config.data, heldout_fraction=recorded))


def layers_read(config: CalibrateConfig, kind: Kind) -> int | None:
    """How many of the target's first layers are read; None: the whole target."""
    if config.answers == "target":
        return None
    return read_meta(config.checkpoint).exit_layer if kind == EARLY_EXIT else 0


def find_target(config: CalibrateConfig, kind: Kind) -> OpenTarget:
    """The target of `config`; the checkpoint of an early exit names its target. Raises `UserError`."""
    if kind == EARLY_EXIT:
        return open_target_of(config.checkpoint, config.target, config.revision)
    assert config.target is not None
    return open_target(config.target, config.revision, by_layers=kind.layers)


def warn_of_template(config: CalibrateConfig, trained_on: Mapping[str, object] | None, target: OpenTarget) -> None:
    """Warn if conversations are rendered by another template here than in the training of the drafter."""
    learned = templates_of(trained_on, target.tokenizer)
    if learned and (other := templates_of(config.data.deciding(), target.tokenizer) - learned):
        told = " and ".join(sorted(learned))
        warn(f"data.template={' and '.join(sorted(other))}: the drafter in {config.checkpoint} learned by {told}")


def longest_prompt(config: CalibrateConfig, target: OpenTarget, limits: Sequence[int]) -> int:
    """The longest prompt that can be continued, in tokens; limits: of the drafter. Raises `UserError` below one."""
    context = min([context_limit(target.config), *limits])
    longest = min(config.seq_len, context - config.new_tokens)
    if longest < 1:
        raise UserError(f"new_tokens={config.new_tokens}: expected less than the context of {context} tokens")
    return longest


def texts_of(config: CalibrateConfig, target: OpenTarget, longest: int) -> dict[Split, list[Text]]:
    """The texts of each split to continue, of prompts of up to `longest` tokens. Raises `UserError` if one has none."""
    counts: dict[Split, int] = {"train": config.prompts, "heldout": config.heldout_prompts}
    found, recorded = dict[Split, list[Text]](), config.answers == "recorded"
    for split, count in counts.items():
        given = config.data, target.tokenizer, config.seq_len
        rows = load_taught_rows(*given, split, cached=recorded, max_rows=count)
        if recorded:
            texts = [text for index in range(len(rows)) if (text := recorded_text(rows[index])) is not None]
            say(f"calibrate split={split} answers={len(texts)} not_greedy={len(rows) - len(texts)}")
            texts = [text for text in texts if len(text.prompt) <= longest]
        else:
            texts = [Text(heldout_prompt(rows[index])[-longest:]) for index in range(len(rows))]
        if not texts:
            raise UserError(f"data={config.data.source}: expected a text of the {split} split that can be continued")
        if len(texts) < count:
            say(f"calibrate split={split}: {len(texts)} texts, not {count}: there are no more")
        found[split] = texts
    return found


def load_decoder(
    config: CalibrateConfig, kind: Kind, target: OpenTarget, model: nn.Module, dtype: torch.dtype, device: torch.device
) -> Callable[..., Iterator[Round]]:
    """See `Drafting.decode`; the drafter `model` is made ready too."""
    layers = layers_read(config, kind)
    if layers == 0:
        lay_out(model, device)
        sizes = {"vocabulary": target.config.vocab_size, "width": target.config.hidden_size}
        return partial(replay, session=partial(RecordedSession, **sizes, device=device))
    if layers is None:
        whole = load_stack(target, None, dtype, device, by_layers=kind.layers)
        prepare_drafters(whole, {kind.name: model})
        return partial(speculative, whole)
    first = target.stack(range(layers), dtype=dtype, device=device)
    prepare_drafters(first, {kind.name: model})
    return partial(replay, session=partial(FirstLayersSession, first))


def save_head(
    config: CalibrateConfig,
    kind: Kind,
    digest: str,
    head: CalibrationHead,
    captured: Mapping[Split, Batch],
    made: Mapping[str, object],
) -> None:
    """Fit the head's temperatures, write its scores, and store it with its drafter."""
    tempering = temper(head, captured["heldout"], keep=config.odds)
    scores = judge(head, captured["train"], only_tested(later_half(captured["heldout"])))
    judged = {**scores, "survival": tempering}
    write_json(Path(config.out_dir) / "calibration.json", judged)
    write_atomically(Path(config.out_dir) / "reliability.png", plot_reliability(scores))
    folder = require_writable(Path(config.checkpoint) / str(kind.calibration))
    save_calibration(folder, head, digest, {**made, "heldout": judged})
    for name, row in scores["predictors"].items():
        print(f"calibration predictor={name} brier={row['brier']:.4f} ece={row['ece']:.4f}", flush=True)
    errors = f"ece_before={tempering['ece_before']:.4f} ece_after={tempering['ece_after']:.4f}"
    print(f"calibration survival {errors} temperatures={'kept' if tempering['kept'] else 'none'}", flush=True)
    print(f"saved calibration={folder} examples={made['examples']}", flush=True)

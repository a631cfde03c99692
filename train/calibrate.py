"""Calibration heads: trained on the outcomes of a drafter's drafts (EESD §3.3).

    python train/calibrate.py checkpoint=runs/eesd

A head estimates the probability that the target accepts a drafted token, from hidden states of target and drafter, the
token's position in the draft, and its probability q ("confidence"). First drafting is captured: the drafter continues
texts, and every token that the target accepts or rejects becomes an example with a label, 1 or 0. The target decodes
the texts, or its answers are on record (answers=recorded). Then the head is fitted to the examples of the split
"train".

`calibrate` is the whole training, `CalibrationStudent.forward` its step with the loss. A student is a module to train;
the loop around the step is train/core/loop.py. A reading says how the tensors in a drafter's files are used.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("calibrate")

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.base.errors import UserError, warn
from outrider.base.files import digest_of, require_writable, write_atomically, write_json
from outrider.base.processes import say
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import Split
from outrider.draft_models.calibration import save_calibration
from outrider.draft_models.calibration_head import CalibrationHead, log_odds
from outrider.draft_models.early_exit.checkpoint import read_meta
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget, pick_dtype
from outrider.draft_models.targets.unseen_target import open_given
from outrider.inference.core.decode import speculative
from outrider.inference.core.rounds import Round
from outrider.inference.drafters.model_plugin import ModelDrafterPlugin
from outrider.inference.engines.packing import lay_out
from outrider.inference.loading import memory_plan
from outrider.inference.loading.chat_templates import templates_of
from outrider.inference.loading.drafters import position_limits
from outrider.inference.loading.models import load_stack, prepare_models
from outrider.inference.loading.target_setup import end_tokens, open_target_of
from outrider.inference.measure.replay import FirstLayersSession, RecordedSession, replay
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.kinds import EARLY_EXIT, KINDS, kind_in
from outrider.inference.settings.method import MethodConfig
from outrider.train.core.driver import training_run
from outrider.train.core.training import Batch, Metrics, Student
from outrider.train.parts import calibration_scores, capture
from outrider.train.parts.heldout import heldout_prompt
from outrider.train.parts.recorded_answers import require_answers_of
from outrider.train.parts.top_k_rows import load_top_k_rows
from outrider.train.settings.drafters import CalibrateConfig


def calibrate(config: CalibrateConfig) -> None:
    """Capture, fit, report, and store the head in `config.checkpoint`.

    Raises `UserError` before the target is loaded if checkpoint, target or directory are unusable.
    """
    kind = kind_to_calibrate(config)
    target = find_target(config, kind)
    make_plan = partial(plan_memory, config, kind, target.config)
    if config.plan:
        print(make_plan(), flush=True)
        return
    with training_run(config, make_plan, config.checkpoint) as run:
        config = with_heldout_of_drafter(config, kind)
        if config.answers == "recorded":
            require_answers_of(target, config.data)
        plugin = kind.load_plugin().read_with(config.reading)  # loads and runs drafters of this kind
        digest = plugin.digest(config.checkpoint)
        assert isinstance(plugin, ModelDrafterPlugin)  # true of every kind that has a head
        warn_of_template(config, plugin.training_record(config.checkpoint).data, target)
        identity = run.from_main(lambda: target.identity)
        record = {name: identity[name] for name in ("config", "tensors")} if target.is_seen else identity
        dtype, end_ids = pick_dtype(config.dtype, target.config, run.device), end_tokens(target)
        drafter = plugin.load(config.checkpoint, target, {}, dtype=dtype, device=run.device)  # {}: with no head

        def load_drafting() -> capture.Drafting:
            decode = load_decoder(config, kind, target, drafter, dtype, run.device)
            make_draft_model = partial(plugin.draft_model, drafter, MethodConfig(kind.name))
            return capture.Drafting(decode, make_draft_model, config.new_tokens, config.max_draft, end_ids)

        settings = {name: value for name, value in config.decisions().items() if name not in ("fit", "l2", "odds")}
        settings["format"] = 2  # 1 took indices of draft vocabularies for ids of end tokens
        settings |= {"drafter": digest, "target": digest_of(record)[:16], "dtype": str(dtype), "ends": sorted(end_ids)}
        texts = load_texts(config, target, position_limits({kind.name: drafter}))
        # A target known by its tokenizer alone gets a vocabulary that holds all ids.
        largest_ids = [max(text.prompt + (text.answer or [])) for split_texts in texts.values() for text in split_texts]
        target = target.resize(max(*largest_ids, *(lm.config.vocab_size - 1 for lm in plugin.causal_lms(drafter))))
        limit = TimeLimit(config.minutes)
        captured = capture.capture_splits(run.out_dir, settings, texts, load_drafting, limit, run.state)
        # Held-out drafts are captured whole. Tested: up to the first rejected token, as all training examples are.
        examples, heldout = captured["train"], capture.select_tested(captured["heldout"])
        heldout = {name: value.to(run.device) for name, value in heldout.items()}

        student = CalibrationStudent(examples, config.l2, odds=config.odds)
        settings = {"capture": settings, "l2": config.l2, "odds": config.odds, "examples": len(examples["label"])}

        def evaluate(step: int) -> Metrics:
            predictions = calibration_scores.predict_acceptance(student.fold_standardisation(), heldout)
            return {"brier": calibration_scores.brier_score(predictions, heldout["label"])}

        identity = {**settings, "labels": digest_of(examples["label"].tolist())[:16]}
        result = run.fit(student, Examples(examples), config.fit, identity=identity, evaluate=evaluate)
        if result is not None:
            facts = {**settings, "data": config.data.source, "fit": asdict(config.fit), "steps": result.steps}
            save_head(config, kind, digest, student.cpu().fold_standardisation(), captured, {**facts, "target": record})


# --- the drafter, its target, and the texts that they continue


def kind_to_calibrate(config: CalibrateConfig) -> Kind:
    """The kind of drafter in `config.checkpoint`. Raises `UserError` if a calibration head cannot read that kind."""
    kind = kind_in(config.checkpoint)
    if kind is None or kind.calibration is None:
        names = ", ".join(f"{spec.name} ({spec.file})" for spec in KINDS.values() if spec.calibration is not None)
        problem = "no drafter there" if kind is None else f"{kind.name} has no hidden states that a head could read"
        hint = "Fetch one that is on the Hub: hf download NAME --local-dir FOLDER"
        raise UserError(f"checkpoint={config.checkpoint}: {problem}; expected the directory of one of {names}. {hint}")
    if not kind.readings and config.reading.overrides:
        raise UserError(f"{config.reading}: expected nothing where checkpoint={config.checkpoint} is no draft head")
    if kind == EARLY_EXIT and config.tokenizer is not None:
        raise UserError(f"tokenizer={config.tokenizer}: expected target=, whose layers an early exit drafts with")
    if kind.readings and config.answers == "recorded":
        raise UserError("answers=recorded: expected target, as a draft head reads nearly all layers of the target")
    if kind != EARLY_EXIT and config.target is None and config.tokenizer is None:
        drafter = f"the {kind.name} in checkpoint={config.checkpoint}"
        raise UserError(f"target=null: expected the model that {drafter} is for, or tokenizer= with answers=recorded")
    return kind


def with_heldout_of_drafter(config: CalibrateConfig, kind: Kind) -> CalibrateConfig:
    """`config` with the held-out share of the drafter's training: so no held-out text is one that the drafter has seen.

    A share in `config` other than the default stays, with a warning.
    """
    data_settings = kind.load_plugin().read_with(config.reading).training_record(config.checkpoint).data or {}
    recorded, fraction = data_settings.get("heldout_fraction"), config.data.heldout_fraction
    if not isinstance(recorded, float) or not 0 < recorded < 1 or recorded == fraction:
        return config
    is_explicit = fraction != DataConfig.heldout_fraction
    message = f"data.heldout_fraction={recorded:g} in the training of {config.checkpoint}"
    (warn if is_explicit else say)(f"{message}, {fraction:g} here" if is_explicit else f"{message}, taken over")
    return config if is_explicit else replace(config, data=replace(config.data, heldout_fraction=recorded))


def layers_read(config: CalibrateConfig, kind: Kind) -> int | None:
    """The number of the target's first layers that are read; None: the whole target."""
    if config.answers == "target":
        return None
    return read_meta(config.checkpoint).exit_layer if kind == EARLY_EXIT else 0


def find_target(config: CalibrateConfig, kind: Kind) -> OpenTarget:
    """The target of `config`; the checkpoint of an early exit names its target. Raises `UserError`."""
    if kind == EARLY_EXIT:
        return open_target_of(config.checkpoint, config.target, config.revision)
    return open_given(config, by_layers=kind.layers)  # kind.layers: it drafts with layers of the target


def warn_of_template(config: CalibrateConfig, data_settings: Mapping[str, object] | None, target: OpenTarget) -> None:
    """Warn if conversations are rendered by another template here than in the training of the drafter."""
    drafter_templates = templates_of(data_settings, target.tokenizer)
    templates = templates_of(config.data.decisions(), target.tokenizer) - drafter_templates
    if drafter_templates and templates:
        names = " and ".join(sorted(drafter_templates))
        warn(f"data.template={' and '.join(sorted(templates))}: the drafter in {config.checkpoint} learned by {names}")


def load_texts(
    config: CalibrateConfig, target: OpenTarget, context_limits: Sequence[int]
) -> dict[Split, list[capture.TextToContinue]]:
    """The texts of each split to continue. context_limits: of the drafter, in tokens.

    Raises `UserError` if a split has no text, and if no prompt leaves room for the new tokens.
    """
    context = min([context_limit(target.config), *context_limits])
    prompt_limit = min(config.seq_len, context - config.new_tokens)
    if prompt_limit < 1:
        raise UserError(f"new_tokens={config.new_tokens}: expected less than the context of {context} tokens")
    max_counts: dict[Split, int] = {"train": config.prompts, "heldout": config.heldout_prompts}
    texts_by_split, has_answers = dict[Split, list[capture.TextToContinue]](), config.answers == "recorded"
    for split, max_texts in max_counts.items():
        load = load_top_k_rows if has_answers else load_rows
        rows = load(config.data, target.tokenizer, config.seq_len, split, max_rows=max_texts)
        if has_answers:
            texts = [text for index in range(len(rows)) if (text := capture.recorded_text(rows[index])) is not None]
            say(f"calibrate split={split} answers={len(texts)} not_greedy={len(rows) - len(texts)}")
            texts = [text for text in texts if len(text.prompt) <= prompt_limit]
        else:
            texts = [capture.TextToContinue(heldout_prompt(rows[index])[-prompt_limit:]) for index in range(len(rows))]
        if not texts:
            raise UserError(f"data={config.data.source}: expected a text of the {split} split that can be continued")
        if len(texts) < max_texts:
            say(f"calibrate split={split}: {len(texts)} texts, not {max_texts}: there are no more")
        texts_by_split[split] = texts
    return texts_by_split


def load_decoder(
    config: CalibrateConfig, kind: Kind, target: OpenTarget, model: nn.Module, dtype: torch.dtype, device: torch.device
) -> Callable[..., Iterator[Round]]:
    """The function that decodes a text in rounds of draft and verification, by the target or its recorded answers.

    The drafter `model` is prepared for decoding too. Of the target only the layers that the drafter shares are read if
    the answers are recorded.
    """
    layer_count = layers_read(config, kind)
    if layer_count == 0:
        lay_out(model, device)
        sizes = {"vocabulary": target.config.vocab_size, "width": target.config.hidden_size}
        return partial(replay, session=partial(RecordedSession, **sizes, device=device))
    if layer_count is None:
        stack = load_stack(target, None, dtype, device, by_layers=kind.layers)
        prepare_models(stack, {kind.name: model})
        return partial(speculative, stack)
    first_layers = target.stack(range(layer_count), dtype=dtype, device=device, coded=device.type == "cpu")
    prepare_models(first_layers, {kind.name: model})
    return partial(replay, session=partial(FirstLayersSession, first_layers))


# --- the head, and the captured tokens as rows


class CalibrationStudent(Student):
    """The head on standardised inputs, so that one learning rate fits every model; see `fold_standardisation`.

    The head begins as the draft's own odds, the log-odds of q, shifted to the mean acceptance, so that few steps are
    enough. captured: the tokens to train on, of which means and deviations are taken. l2: the weight of the penalty.
    odds=False: the draft's odds get no weight, as in the paper.
    """

    mean_target: Tensor  # [d_target], of hidden states, as the scale
    mean_draft: Tensor  # [d_draft]
    scale_target: Tensor
    scale_draft: Tensor
    mean_odds: Tensor  # scalars
    scale_odds: Tensor

    def __init__(self, captured: Batch, l2: float, *, odds: bool = True):
        super().__init__()
        self.l2 = l2 / len(captured["label"])
        draft_odds = log_odds(captured["confidence"].log())  # [n]
        self.register_buffer("mean_odds", draft_odds.mean(), persistent=False)
        self.register_buffer("scale_odds", draft_odds.std().clamp_min(1e-6), persistent=False)
        for name in ("target", "draft"):
            hidden_states = captured[f"{name}_hidden"].float()
            self.register_buffer(f"mean_{name}", hidden_states.mean(0), persistent=False)
            self.register_buffer(f"scale_{name}", hidden_states.std(0).clamp_min(1e-6), persistent=False)
        self.head = CalibrationHead(self.mean_target.shape[0], self.mean_draft.shape[0])
        acceptance_rate = captured["label"].float().mean().clamp(0.01, 0.99)  # so that its logit is finite
        nn.init.constant_(self.head.bias, float(acceptance_rate.logit()))
        nn.init.constant_(self.head.odds, float(self.scale_odds) if odds else 0.0)
        self.head.odds.requires_grad_(odds)

    def forward(
        self, target_hidden: Tensor, draft_hidden: Tensor, position: Tensor, confidence: Tensor, labels: Tensor
    ) -> Batch:
        """{"loss_sum"} over labels that are not IGNORE: binary cross-entropy, plus each label's share of
        l2 · ‖weights‖². The problem is convex. Inputs are rows of `Examples`: hidden states [rows, tokens, d], the
        others [rows, tokens]. There are thousands of weights and only thousands of tokens, so a head without l2 is
        overconfident. The weight of the draft's own odds is not penalised."""
        mask = labels != IGNORE
        target_input = (target_hidden[mask].float() - self.mean_target) / self.scale_target
        draft_input = (draft_hidden[mask].float() - self.mean_draft) / self.scale_draft
        odds = (log_odds(confidence[mask].log()) - self.mean_odds) / self.scale_odds
        logits = self.head.weigh(target_input, draft_input, position[mask], odds)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[mask].float(), reduction="sum")
        penalty = self.head.target.square().sum() + self.head.draft.square().sum()
        return {"loss_sum": loss + self.l2 * len(logits) * penalty}

    @torch.no_grad()
    def fold_standardisation(self) -> CalibrationHead:
        """The same head for raw inputs: the standardisation is folded into its weights."""
        raw_head = CalibrationHead(self.mean_target.shape[0], self.mean_draft.shape[0]).to(self.mean_target.device)
        raw_head.target.copy_(self.head.target / self.scale_target)
        raw_head.draft.copy_(self.head.draft / self.scale_draft)
        raw_head.odds.copy_(self.head.odds / self.scale_odds)
        shift = raw_head.target @ self.mean_target + raw_head.draft @ self.mean_draft + raw_head.odds * self.mean_odds
        raw_head.bias.copy_(self.head.bias - shift)
        return raw_head.requires_grad_(False)


class Examples:
    """Captured tokens as rows of `ROW_TOKENS` tokens for `fit`; the last row is padded with tokens labelled IGNORE."""

    def __init__(self, captured: Batch):
        self.captured = captured

    def __len__(self) -> int:
        return -(-len(self.captured["label"]) // capture.ROW_TOKENS)  # rounded up

    def __getitem__(self, index: int) -> Batch:
        tokens = slice(index * capture.ROW_TOKENS, (index + 1) * capture.ROW_TOKENS)
        names = ("target_hidden", "draft_hidden", "position", "confidence", "label")
        chunk = {name: self.captured[name][tokens] for name in names}
        pad_count = capture.ROW_TOKENS - len(chunk["label"])
        # Padded at the end of the first dimension.
        row = {name: nn.functional.pad(v, (0, 0) * (v.ndim - 1) + (0, pad_count)) for name, v in chunk.items()}
        labels = row.pop("label").long()
        labels[capture.ROW_TOKENS - pad_count :] = IGNORE
        return {**row, "labels": labels}


# --- what is saved, and the memory


def save_head(
    config: CalibrateConfig,
    kind: Kind,
    drafter_digest: str,
    head: CalibrationHead,
    captured: Mapping[Split, Batch],
    head_facts: Mapping[str, object],
) -> None:
    """Fit the head's temperatures, write its scores, and store it with its drafter. Temperatures, one a position, scale
    logits to calibrate survival: the probability that all tokens up to a position are accepted, a product."""
    temper_scores = calibration_scores.temper_head(head, captured["heldout"], keep=config.odds)
    later_half = calibration_scores.rounds_of_later_half(captured["heldout"])  # the earlier half fits the temperatures
    scores = calibration_scores.score_head(head, captured["train"], capture.select_tested(later_half))
    report = {**scores, "survival": temper_scores}
    write_json(Path(config.out_dir) / "calibration.json", report)
    write_atomically(Path(config.out_dir) / "reliability.png", calibration_scores.plot_reliability(scores))
    folder = require_writable(Path(config.checkpoint) / str(kind.calibration))
    save_calibration(folder, head, drafter_digest, {**head_facts, "heldout": report})
    for predictor, metrics in scores["predictors"].items():
        print(f"calibration predictor={predictor} brier={metrics['brier']:.4f} ece={metrics['ece']:.4f}", flush=True)
    ece_text = f"ece_before={temper_scores['ece_before']:.4f} ece_after={temper_scores['ece_after']:.4f}"
    print(f"calibration survival {ece_text} temperatures={'kept' if temper_scores['kept'] else 'none'}", flush=True)
    print(f"saved calibration={folder} examples={head_facts['examples']}", flush=True)


def plan_memory(config: CalibrateConfig, kind: Kind, target_config: PreTrainedConfig) -> memory_plan.Plan:
    """The memory of each device while the head's training data is captured, with a target of this config."""
    device = memory_plan.planned_device()
    max_positions = min(config.seq_len + config.new_tokens, context_limit(target_config))  # of the longest text
    storage = memory_plan.Storage.of(config.dtype, target_config, max_positions, device)
    plugin = kind.load_plugin().read_with(config.reading)
    memory_parts = memory_plan.target_memory(target_config, storage, layers_read(config, kind))
    memory_parts += memory_plan.drafter_memory(kind, plugin, config.checkpoint, target_config, storage)
    dtype_name = memory_plan.dtype_name(config.dtype, target_config, device)
    return memory_plan.Plan(memory_parts, {"positions": max_positions, "dtype": dtype_name})

"""The training data of a calibration head: the drafter, the texts, and the model that continues them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from outrider.base.errors import UserError, warn
from outrider.base.processes import say
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import Split
from outrider.draft_models.early_exit.checkpoint import read_meta
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget, open_target
from outrider.inference.core.decode import speculative
from outrider.inference.core.rounds import Round
from outrider.inference.engines.packing import lay_out
from outrider.inference.loading.chat_templates import templates_of
from outrider.inference.loading.memory_plan import Storage, drafter_memory, dtype_name, planned_device, target_memory
from outrider.inference.loading.models import load_stack, prepare_models
from outrider.inference.loading.target_setup import open_target_of
from outrider.inference.measure.replay import FirstLayersSession, RecordedSession, replay
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.kinds import EAGLE3, EARLY_EXIT, KINDS, kind_in
from outrider.train.core.training import Plan
from outrider.train.parts.capture import Text, recorded_text
from outrider.train.parts.heldout import heldout_prompt
from outrider.train.parts.top_k_rows import load_top_k_rows
from outrider.train.settings.drafters import CalibrateConfig


def kind_to_calibrate(config: CalibrateConfig) -> Kind:
    """The kind of drafter in `config.checkpoint`. Raises `UserError` if a calibration head cannot read that kind."""
    kind = kind_in(config.checkpoint)
    if kind is None or kind.calibration is None:
        expected = ", ".join(f"{spec.name} ({spec.file})" for spec in KINDS.values() if spec.calibration is not None)
        problem = "no drafter there" if kind is None else f"{kind.name} has no hidden states that a head could read"
        raise UserError(
            f"checkpoint={config.checkpoint}: {problem}; expected the directory of one of {expected}. Fetch one that "
            "is on the Hub: hf download NAME --local-dir FOLDER"
        )
    if kind != EAGLE3 and config.reading.stated():
        raise UserError(f"{config.reading}: expected nothing where checkpoint={config.checkpoint} is no EAGLE-3 head")
    if kind == EAGLE3 and config.answers == "recorded":
        raise UserError("answers=recorded: expected target, as an EAGLE-3 head reads nearly all layers of the target")
    if kind != EARLY_EXIT and config.target is None:
        drafter = f"the {kind.name} in checkpoint={config.checkpoint}"
        raise UserError(f"target=null: expected the model that {drafter} is for")
    return kind


def with_its_heldout(config: CalibrateConfig, kind: Kind) -> CalibrateConfig:
    """`config` with the held-out share of the drafter's training, so that the head is not tested on text that the
    drafter has seen.

    A share other than the default is kept, with a warning.
    """
    data = kind.load_plugin().read_with(config.reading).training_record(config.checkpoint).data or {}
    recorded, fraction = data.get("heldout_fraction"), config.data.heldout_fraction
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
    assert config.target is not None
    return open_target(config.target, config.revision, by_layers=kind.layers)


def warn_of_template(config: CalibrateConfig, trained_on: Mapping[str, object] | None, target: OpenTarget) -> None:
    """Warn if conversations are rendered by another template here than in the training of the drafter."""
    learned = templates_of(trained_on, target.tokenizer)
    if learned and (templates := templates_of(config.data.deciding(), target.tokenizer) - learned):
        names = " and ".join(sorted(learned))
        warn(f"data.template={' and '.join(sorted(templates))}: the drafter in {config.checkpoint} learned by {names}")


def texts_of(config: CalibrateConfig, target: OpenTarget, limits: Sequence[int]) -> dict[Split, list[Text]]:
    """The texts of each split to continue. limits: context limits of the drafter, in tokens. Raises `UserError` if a
    split has none, and if no prompt leaves room for the new tokens."""
    context = min([context_limit(target.config), *limits])
    longest = min(config.seq_len, context - config.new_tokens)
    if longest < 1:
        raise UserError(f"new_tokens={config.new_tokens}: expected less than the context of {context} tokens")
    counts: dict[Split, int] = {"train": config.prompts, "heldout": config.heldout_prompts}
    by_split, recorded = dict[Split, list[Text]](), config.answers == "recorded"
    for split, count in counts.items():
        load = load_top_k_rows if recorded else load_rows
        rows = load(config.data, target.tokenizer, config.seq_len, split, max_rows=count)
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
        by_split[split] = texts
    return by_split


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
        stack = load_stack(target, None, dtype, device, by_layers=kind.layers)
        prepare_models(stack, {kind.name: model})
        return partial(speculative, stack)
    first = target.stack(range(layers), dtype=dtype, device=device, coded=device.type == "cpu")
    prepare_models(first, {kind.name: model})
    return partial(replay, session=partial(FirstLayersSession, first))


def capture_plan(config: CalibrateConfig, kind: Kind) -> Plan:
    """The memory of each device while the head's training data is captured."""
    target, device = find_target(config, kind).config, planned_device()
    positions = min(config.seq_len + config.new_tokens, context_limit(target))  # of the longest text
    storage = Storage.of(config.dtype, target, positions, device)
    plugin = kind.load_plugin().read_with(config.reading)
    held = target_memory(target, storage, layers_read(config, kind))
    held += drafter_memory(kind, plugin, config.checkpoint, target, storage)
    return Plan(held, {"positions": positions, "dtype": dtype_name(config.dtype, target, device)})

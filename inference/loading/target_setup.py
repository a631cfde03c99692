"""The target of a run before its weights are loaded: found, identified by digests, and how it will run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.base.errors import UserError, require, warn
from outrider.base.words import list_words
from outrider.data_prep.text.settings import ChatTemplate, PromptTemplate
from outrider.draft_models.targets.open_target import OpenTarget, open_target, pick_device, pick_dtype
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments
from outrider.inference.core.stop_strings import StopStrings
from outrider.inference.loading.chat_templates import chat_template, conversations_in
from outrider.inference.loading.generation_config import Inherited, TextSettings, inherit, read_generation_config
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import EARLY_EXIT, KINDS, kind_in
from outrider.inference.settings.method import preset
from outrider.inference.settings.sampling import SamplingConfig


@dataclass(frozen=True)
class TargetSetup:
    """The target before its weights are loaded, and how it will run. Kinds are those of drafters (early_exit, …)."""

    target: OpenTarget
    eos: frozenset[int]  # the ids that end a text
    stops: tuple[str, ...]  # the stop strings
    inherited: Inherited  # settings from its generation config
    device: torch.device
    dtype: torch.dtype
    int8: bool = False  # whether it is quantised to int8, computing in `dtype`
    template: PromptTemplate = "auto"  # as requested
    trained: Mapping[str, frozenset[ChatTemplate]] = field(default_factory=dict)  # of drafters' training, by their kind
    arguments: Mapping[str, object] = field(default_factory=dict)  # what the chat template reads besides messages

    @property
    def chat_template(self) -> PromptTemplate:
        """The template that renders chat prompts (see `chat_template`). Raises `UserError`."""
        return chat_template(self.template, self.trained)

    def text(self, max_new_tokens: int, sampling: SamplingConfig) -> TextSettings:
        """The decoding settings of texts of up to `max_new_tokens` tokens."""
        return TextSettings(max_new_tokens, self.eos, sampling, self.inherited.config, self.stops, self.tokenizer)

    @property
    def config(self) -> PreTrainedConfig:
        return self.target.config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:  # without arguments `chat_template`, which may raise, is not asked
        return bind_arguments(self.target.tokenizer, self.arguments, self.chat_template if self.arguments else "auto")

    @property
    def numbers(self) -> str:
        """The name of the dtype of its weights."""
        return "int8" if self.int8 else self.floats

    @property
    def floats(self) -> str:
        """The name of the dtype it computes in."""
        return str(self.dtype).removeprefix("torch.")


def find_setup(config: EvaluateConfig) -> TargetSetup:
    """The target of `config`, its device and how it will run. Raises `UserError`."""
    target = find_target(config)
    _ = target.fingerprint  # raises for an unusable target, before anything else does
    eos = frozenset() if config.ignore_eos else end_tokens(target)
    inherited = inherit(
        target.source, target.revision, config.sampling, config.stop_strings,
        eos=eos, vocabulary=target.config.vocab_size, ignore=config.generation_config == "none",
    )  # fmt: skip
    stops = tuple(config.stop_strings or inherited.fields.get("stop_strings", ()))
    if stops:
        StopStrings(stops, target.tokenizer)  # raises for unusable stop strings
    device = pick_device(config.device)
    dtype, is_int8 = pick_dtype(config.dtype, target.config, device), config.dtype == "int8"
    if is_int8:
        target.require_int8()
    templates, chat_kwargs = _templates_of_training(config, target), config.chat_template_kwargs
    setup = TargetSetup(target, eos, stops, inherited, device, dtype, is_int8, config.template, templates, chat_kwargs)
    _ = setup.tokenizer  # raises for arguments that the template does not read
    return setup


def _templates_of_training(config: EvaluateConfig, target: OpenTarget) -> dict[str, frozenset[ChatTemplate]]:
    """The templates of the drafters' training, by kind. Warns of settings that differ from it."""
    templates: dict[str, frozenset[ChatTemplate]] = {}
    chat_kwargs = config.chat_template_kwargs
    for kind, record in config.training_records().items():
        if sources := conversations_in(record.data, target.tokenizer):
            templates[kind] = frozenset(source.template for source in sources)
            if chat_kwargs not in (learned := [source.chat_template_kwargs for source in sources]):
                warn(f"{KWARGS}={chat_kwargs}: the conversations that the {kind} drafter learned from had {learned[0]}")
    if config.template == "none" and templates and {"none"} not in templates.values():
        origins = ", ".join(f"{kind} learned by {' and '.join(sorted(names))}" for kind, names in templates.items())
        warn(f"template=none: chat prompts are bare text, but {origins}; leave template= out to measure that")
    return templates


def find_target(config: EvaluateConfig) -> OpenTarget:
    """The target of `config`, else its early exit's. Raises `UserError`, also if `checkpoint` holds no drafter."""
    if config.checkpoint is not None and config.checkpoint_kind is None:
        raise UserError(f"checkpoint={config.checkpoint}: {no_drafter_in(Path(config.checkpoint))}")
    if config.early_exit is None:
        assert config.target is not None
        return open_target(config.target, config.revision, by_layers=config.by_layers)
    return open_target_of(config.early_exit, config.target, config.revision)


def open_target_of(checkpoint: str, target: str | None, revision: str | None) -> OpenTarget:
    """The target of the early exit (drafter on its first layers) in `checkpoint`: `target` if given, else the recorded
    one, whose relative path is looked for here, then in the folders above `checkpoint`. Raises `UserError`."""
    record = EARLY_EXIT.load_plugin().training_record(checkpoint)
    paths = (folder / str(record.target) for folder in (Path(), *Path(checkpoint).resolve().parents))
    source = next((str(path) for path in paths if path.exists()), record.target)
    try:
        recorded = record.revision if target in (None, record.target) else None  # of another repository it says nothing
        return open_target(str(target or source), revision or recorded)
    except UserError as error:
        if target is not None:
            raise
        raise UserError(f"{error}. checkpoint={checkpoint} was trained for it: give target=, where it is now") from None


def config_with_drafter(config: EvaluateConfig, setup: TargetSetup, checkpoint: str) -> EvaluateConfig:
    """`config`, of one method, with the drafter in the directory `checkpoint`, and for another kind its default method.

    Raises `UserError` where there is no drafter, or one that learned by another template than that of `setup`.
    """
    kind = kind_in(checkpoint)
    if kind is None or kind.preset is None:  # the latter for the type checker: kinds with a file have a preset
        raise UserError(f"checkpoint={checkpoint}: {no_drafter_in(Path(checkpoint))}")
    [(name, method)] = config.methods.items()
    methods = {name: method} if method.source == kind.name else {kind.preset: preset(kind.preset)}
    cleared_options: dict[str, Any] = {str(k.option): None for k in KINDS.values() if hasattr(config, str(k.option))}
    drafter_settings = {**cleared_options, "checkpoint": checkpoint, "drafters": {}, "methods": methods}
    config = replace(config, target=setup.target.source, **drafter_settings)
    trained_template = replace(setup, trained=_templates_of_training(config, setup.target)).chat_template
    # Without a recorded template (auto) the tokenizer's renders prompts.
    same = trained_template == setup.chat_template or {trained_template, setup.chat_template} == {"auto", "tokenizer"}
    require(same, "checkpoint", checkpoint, f"one trained on conversations that template={setup.chat_template} renders")
    return config


def no_drafter_in(folder: Path) -> str:
    """An error text: the contents of `folder`, which is no drafter, and the expected ones."""
    kinds_by_file: dict[str, list[str]] = {}
    for kind in KINDS.values():
        if kind.file is not None:
            kinds_by_file.setdefault(kind.file, []).append(kind.name)
    expected = ", ".join(f"{file} ({' or '.join(names)})" for file, names in kinds_by_file.items())
    if not folder.is_dir():
        return f"no such directory; expected one with {expected}; a Hub name goes to small_lm=, eagle3= or dflash="
    contents = list_words(sorted(file.name for file in folder.iterdir())) or "nothing"
    return f"found {contents}: expected a directory with {expected}"


def end_tokens(target: OpenTarget) -> frozenset[int]:
    """The ids that end a text: from generation_config.json, else config.json, else the tokenizer. Raises `UserError`
    for invalid ids. Of a target that is not seen, as on a server, only a tokenizer and maybe a config are here."""
    configured = read_generation_config(target.source, target.revision).eos_token_id if target.is_seen else None
    for candidate in (configured, target.config.eos_token_id, target.tokenizer.eos_token_id):
        if candidate is not None:
            ids = candidate if isinstance(candidate, list) else [candidate]
            is_valid = all(type(i) is int and i >= 0 for i in ids)
            require(is_valid, f"{target.source}: eos_token_id", candidate, "token ids")
            return frozenset(ids)
    return frozenset()

"""The target of a run and its drafters: located and identified by digests, loaded, and prepared for decoding."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import UserError, require, warn
from outrider.base.progress import Stage
from outrider.base.settings import construct
from outrider.base.streams import Streams
from outrider.base.words import listed
from outrider.data_prep.text.settings import ChatTemplate, DataConfig, PromptTemplate
from outrider.draft_models.targets.attention import ATTENTION
from outrider.draft_models.targets.int8 import quantise
from outrider.draft_models.targets.model_files import layer_stack, load_causal_lm
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import (
    OpenTarget,
    open_target,
    pick_device,
    pick_dtype,
    position_limit,
    stored_dtype,
    why_not_by_layers,
)
from outrider.draft_models.targets.proof import NotByLayersError, prove_layers, prove_rows, require_all_kept
from outrider.draft_models.targets.stack import WholeModel
from outrider.draft_models.targets.target import Target
from outrider.draft_models.targets.vocabulary import KWARGS, with_arguments
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.stop_strings import StopStrings
from outrider.inference.core.target_session import Runtime
from outrider.inference.drafters.plugin import ModelOptions
from outrider.inference.engines.cpu.recorded import can_pack, recorded
from outrider.inference.loading.generation_config import Inherited, TextSettings, inherit, read_generation_config
from outrider.inference.settings.evaluate import DraftingConfig, EvaluateConfig
from outrider.inference.settings.kinds import EARLY_EXIT, KINDS
from outrider.inference.settings.method import MethodConfig, number
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.shapes import find_shape
from outrider.inference.sizing.policy import Tuning

Drafters = Mapping[str, object]  # the loaded model of each kind (see `inference.settings.kinds`) that has one


@dataclass(frozen=True)
class TargetSetup:
    """The target before its weights are loaded, and how it will run.

    eos: the ids that end a text. stops: the stop strings. inherited: settings from its generation config.
    int8: whether it is quantised to int8, computing in `dtype`.
    template: as requested; trained: the templates of the drafters' training, by kind (see `templates_of`).
    arguments: what the chat template reads besides.
    """

    target: OpenTarget
    eos: frozenset[int]
    stops: tuple[str, ...]
    inherited: Inherited
    device: torch.device
    dtype: torch.dtype
    int8: bool = False
    template: PromptTemplate = "auto"
    trained: Mapping[str, frozenset[ChatTemplate]] = field(default_factory=dict)
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def chat_template(self) -> PromptTemplate:
        """The template that renders chat prompts (see `chat_template`). Raises `UserError`."""
        return chat_template(self.template, self.trained)

    def text(self, max_new_tokens: int, sampling: SamplingConfig) -> TextSettings:
        """The decoding settings of texts with these lengths."""
        return TextSettings(max_new_tokens, self.eos, sampling, self.inherited.config, self.stops, self.tokenizer)

    @property
    def config(self) -> PreTrainedConfig:
        return self.target.config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return with_arguments(self.target.tokenizer, self.arguments, self.chat_template if self.arguments else "auto")

    @property
    def numbers(self) -> str:
        """The name of the dtype of its weights."""
        return "int8" if self.int8 else self.floats

    @property
    def floats(self) -> str:
        """The name of the dtype it computes in."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Models:
    """The loaded models of an evaluation. plain: the target as transformers runs it; stack: as `runtime` does.

    products: the CPU kernels of their matrix products (see `inference.engines.cpu.recorded`).
    """

    plain: PreTrainedModel
    stack: Target
    drafters: Drafters
    runtime: Runtime
    products: dict[str, str] = field(default_factory=dict)


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
    dtype, int8 = pick_dtype(config.dtype, target.config, device), config.dtype == "int8"
    if int8:
        target.require_int8()
    arguments, trained = config.chat_template_kwargs, dict[str, frozenset[ChatTemplate]]()
    for kind, record in config.training_records().items():
        if parts := conversations_in(record.data, target.tokenizer):
            trained[kind] = frozenset(part.template for part in parts)
            if arguments not in (learned := [part.chat_template_kwargs for part in parts]):
                warn(f"{KWARGS}={arguments}: the conversations that the {kind} drafter learned from had {learned[0]}")
    if config.template == "none" and trained and {"none"} not in trained.values():
        origins = ", ".join(f"{kind} learned by {' and '.join(sorted(names))}" for kind, names in trained.items())
        warn(f"template=none: chat prompts are bare text, but {origins}; leave template= out to measure that")
    setup = TargetSetup(target, eos, stops, inherited, device, dtype, int8, config.template, trained, arguments)
    _ = setup.tokenizer  # raises for arguments that the template does not read
    return setup


def find_target(config: EvaluateConfig) -> OpenTarget:
    """The target of `config`, else its early exit's. Raises `UserError`, also if `checkpoint` holds no drafter."""
    if config.checkpoint is not None and config.held is None:
        raise UserError(f"checkpoint={config.checkpoint}: {no_drafter_in(Path(config.checkpoint))}")
    if config.early_exit is None:
        assert config.target is not None
        return open_target(config.target, config.revision, by_layers=config.by_layers)
    return open_target_of(config.early_exit, config.target, config.revision)


def open_target_of(checkpoint: str, target: str | None, revision: str | None) -> OpenTarget:
    """The target of an early exit: `target` if given, else the recorded one. Raises `UserError`.

    A recorded path that is relative is looked for here, then in the folders above `checkpoint`.
    """
    record = EARLY_EXIT.load_plugin().training_record(checkpoint)
    paths = (folder / str(record.target) for folder in (Path(), *Path(checkpoint).resolve().parents))
    source = next((str(path) for path in paths if path.exists()), record.target)
    try:
        return open_target(str(target or source), revision or record.revision)
    except UserError as error:
        if target is not None:
            raise
        raise UserError(f"{error}. checkpoint={checkpoint} was trained for it: give target=, where it is now") from None


def no_drafter_in(folder: Path) -> str:
    """An error text: the contents of `folder`, which is no drafter, and the expected ones."""
    files: dict[str, list[str]] = {}
    for kind in KINDS.values():
        if kind.file is not None:
            files.setdefault(kind.file, []).append(kind.name)
    expected = ", ".join(f"{file} ({' or '.join(names)})" for file, names in files.items())
    if not folder.is_dir():
        return f"no such directory; expected one with {expected}; a Hub name goes to small_lm= or eagle3="
    contents = listed(sorted(file.name for file in folder.iterdir())) or "nothing"
    return f"found {contents}: expected a directory with {expected}"


def end_tokens(target: OpenTarget) -> frozenset[int]:
    """The ids that end a text: from generation_config.json, else config.json, else the tokenizer.

    Raises `UserError` for invalid ids.
    """
    listed = read_generation_config(target.source, target.revision).eos_token_id
    for candidate in (listed, target.config.eos_token_id, target.tokenizer.eos_token_id):
        if candidate is not None:
            ids = candidate if isinstance(candidate, list) else [candidate]
            valid = all(type(i) is int and i >= 0 for i in ids)
            require(valid, f"{target.source}: eos_token_id", candidate, "token ids")
            return frozenset(ids)
    return frozenset()


def context_length(setup: TargetSetup, drafters: Drafters) -> int:
    """The context length that the target and all its draft models support."""
    return min([context_limit(setup.config), *position_limits(drafters)])


def position_limits(drafters: Drafters) -> list[int]:
    """The context limits, in positions, of the models that `drafters` run, if they have limits."""
    models = [model for name, drafter in drafters.items() for model in KINDS[name].load_plugin().causal_lms(drafter)]
    return [limit for model in models if (limit := position_limit(model.config)) is not None]


def load_drafters(config: DraftingConfig, target: Any, **tensor_options: Unpack[ModelOptions]) -> Drafters:
    """The models whose paths `config` gives, by kind, for this target. Raises `UserError`."""
    for method in config.methods.values():
        if KINDS[method.source].layers:
            KINDS[method.source].load_plugin().require_fits(method, target.config.num_hidden_layers)
    drafters: dict[str, object] = {}
    for name, where in config.paths.items():
        drafters[name] = config.plugin(KINDS[name]).load(where, target, config.methods, **tensor_options)
    for tree in (method.structure for method in config.methods.values() if method.structure.kind == "static"):
        find_shape(tree.shape, number(tree.nodes))  # invalid shapes fail before the target is loaded
    return {name: model for name, model in drafters.items() if model is not None}


def load_models(
    config: EvaluateConfig, setup: TargetSetup, drafters: Drafters, products: Mapping[str, str] | None = None
) -> Models:
    """Load the target, and prepare it and its drafters for decoding.

    products: the CPU kernels to use; None: the fastest ones, measured now. Raises `UserError` for unavailable ones.
    """
    plain = load_plain(setup.target, setup.dtype, setup.device, int8=setup.int8)
    stack = load_stack(setup.target, plain, setup.dtype, setup.device, by_layers=config.by_layers, int8=setup.int8)
    with recorded(products) as kernels:
        prepare(stack, drafters, plain)
    return Models(plain, stack, drafters, make_runtime(config.runtime, setup.device), kernels)


def load_stack(
    target: OpenTarget,
    plain: PreTrainedModel | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    by_layers: bool,
    int8: bool = False,
) -> Target:
    """The target as this runtime runs it: layer by layer, or, unless `by_layers`, by its own forward as a fallback.

    plain: the target as transformers runs it, if loaded. int8: quantised to int8, computing in `dtype`. Raises
    `UserError` if neither can be proven equal to the target.
    """
    try:
        if (refusal := why_not_by_layers(target.config)) is not None:
            raise NotByLayersError(f"target={target.source}: {refusal}")
        if plain is None or can_pack(device, dtype):  # then load a separate copy: transformers' stays unpacked
            return target.stack(dtype=dtype, device=device, int8=int8, coded=device.type == "cpu")
        prove_layers(plain, f"target={target.source}")
        return layer_stack(plain)
    except NotByLayersError as error:  # for other errors no fallback would help
        if by_layers:
            raise
        print(f"by_layers=no reason={str(error)!r}", flush=True)
    fallback = WholeModel(plain or load_plain(target, dtype, device, int8=int8))
    judged = fallback if dtype == torch.float32 else WholeModel(load_plain(target, torch.float32, device))
    try:
        require_all_kept(target.config)
        prove_rows(judged)
    except UserError as error:
        raise UserError(f"target={target.source}: neither by layers nor by its own forward ({error})") from None
    return fallback


def load_plain(target: OpenTarget, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> PreTrainedModel:
    """The whole target as transformers loads it: the reference of every comparison.

    int8: quantised to int8, computing in `dtype`. Its codes equal the stack's, as both quantise the stored weights.
    """
    attention = ATTENTION if why_not_by_layers(target.config) is None else None
    stored = stored_dtype(target.config) if int8 else dtype
    model = load_causal_lm(
        target.source, target.revision, coded=device.type == "cpu", dtype=stored, attn_implementation=attention
    )
    model.requires_grad_(False).eval()
    if int8:
        quantise(model, dtype, f"target={target.source}")
    return nn.Module.to(model, device)


def new_drafter(
    method: MethodConfig, drafters: Drafters, streams: Streams, drawn: bool = False, tuning: Tuning | None = None
) -> Drafter:
    """A new drafter of `method`, for the generation of `streams`.

    drawn: sample drafts from q. tuning: for sizes that are "auto" (see `inference.measure.probe`): those that pay
    beside other texts, unless drawn. What is drawn depends on the sizes, and is a function of the seed.
    """
    if tuning is not None and drawn:
        tuning = replace(tuning, shared=None)
    kind = KINDS[method.source]
    return kind.load_plugin().make(drafters.get(kind.name), method, streams, drawn=drawn, tuning=tuning)


def prepare(target: Target, drafters: Drafters, plain: PreTrainedModel | None = None) -> None:
    """Prepare a target and its drafters for decoding: fuse layers, pack weights for the device, share heads.

    plain: the target as transformers runs it; where its weights are codes, they are multiplied as the target's are.
    """
    from outrider.inference.engines.packing import lay_out, pack_codes  # the engines: imported only for decoding

    with Stage("laying out weights, compiling what is new"):
        if target.layered is not None:  # else it runs unchanged
            lay_out(target.layered, target.device)
        if plain is not None:
            pack_codes(plain)
        for name, model in drafters.items():
            KINDS[name].load_plugin().prepare(model, target)


def make_runtime(name: str, device: torch.device) -> Runtime:
    """The runtime called `name` (auto | eager | graphed); auto is graphed on CUDA and eager elsewhere."""
    if name == "graphed" or (name == "auto" and device.type == "cuda"):
        from outrider.inference.engines.graphs.cuda_graphs import Graphed  # an engine is loaded only where it is used

        return Graphed()
    return Runtime()


# --- the template of chat prompts: by default that of the drafters' training data

_PLAIN = ("text", "code")  # layouts without conversations


def templates_of(data: Mapping[str, object] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[ChatTemplate]:
    """The templates of `conversations_in`."""
    return frozenset(part.template for part in conversations_in(data, tokenizer))


def conversations_in(data: Mapping[str, object] | None, tokenizer: PreTrainedTokenizerBase) -> list[DataConfig]:
    """The sources of conversations in the recorded settings `data` of a training; none if they are unknown.

    template=tokenizer is recorded for plain text too, so it means nothing if the tokenizer has no chat template.
    """
    if data is None or "template" not in data:
        return []
    try:
        config: DataConfig = construct(DataConfig, data)
    except UserError:
        return []
    parts = [part for _, _, part in config.parts()] or [config]
    talk = [part for part in parts if part.source != "python_stdlib" and part.layout not in _PLAIN]
    return [part for part in talk if part.template != "tokenizer" or tokenizer.chat_template]


def chat_template(template: PromptTemplate, trained: Mapping[str, frozenset[ChatTemplate]]) -> PromptTemplate:
    """The template of chat prompts: `template`, or for auto the template of the drafters' training.

    It remains auto if none is recorded. Raises `UserError` if the drafters differ, or if `template` is another template
    than one of them was trained with. template=none means bare text and is never refused.
    """
    kinds = ", ".join(f"{kind} by {' and '.join(sorted(names))}" for kind, names in trained.items())
    templates = sorted(frozenset[ChatTemplate]().union(*trained.values()))
    if template == "auto":
        if len(templates) > 1:
            raise UserError(f"template=auto: the training's conversations were rendered for {kinds}; give template=")
        return templates[0] if templates else "auto"
    for kind, names in trained.items():
        if template != "none" and template not in names:
            raise UserError(
                f"template={template}: expected {' or '.join(sorted(names))}, by which the conversations were rendered "
                f"that the {kind} drafter was trained on; leave template= out, or give template=none for bare text"
            )
    return template

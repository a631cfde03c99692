"""debug=true: the same command on tiny random models and a few rows, without a network; the inputs are checked first.

`small` makes settings small by the options' names, for all commands and all steps of a pipeline.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.base.errors import UserError
from outrider.base.files import require_writable
from outrider.base.run_dirs import clear, rehearsal_folder, require_rehearsal
from outrider.base.settings import Settings
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.records import Counts
from outrider.data_prep.text.settings import DataConfig, SourceConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.targets.encoder import open_encoder
from outrider.draft_models.targets.settings import EAGLE3, EARLY_EXIT, SMALL_LM, TABLE, TARGET, RehearsedConfig
from outrider.draft_models.targets.vocabulary import KWARGS, with_arguments
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS, kind_in

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

MODELS = "tiny_models"
Config = TypeVar("Config", bound=RehearsedConfig)
Small = TypeVar("Small", bound=Settings)
Source = TypeVar("Source", bound=SourceConfig)
# By an option's name, in any settings: limits of numbers, replacements of given values, values to set, and options to
# reset to their defaults.
_MOST: Mapping[str, float] = {
    "seq_len": 64, "eval_rows": 4, "decode_prompts": 2, "decode_tokens": 8, "draft_vocabulary": 64, "draft_steps": 4,
    "exit_layer": 1, "prompts": 4, "heldout_prompts": 2, "new_tokens": 8, "on_policy_tokens": 8, "prefix_tokens": 24,
    "prompt_chars": 120, "max_new_tokens": 12, "top_k_logits": 8, "batch_size": 8, "shard_size": 8, "num_prompts": 2,
    "repeats": 1, "workers": 1, "memory_gb": 0.1, "warmup": 2, "vocabulary": 320, "layers": 3,
}  # fmt: skip
_OF_STEPS: Mapping[str, float] = {"seq_len": 1024, "batch_rows": 4, "micro_batch_rows": 4}  # in one process, on answers
_GIVEN: Mapping[str, object] = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
_SET: Mapping[str, object] = {
    "epochs": None, "steps": 2, "log_every": 1, "eval_every": 1, "save_every": 1, "compile": False, "model": "tiny",
    "answers": "target", "minutes": None, "count": 96,
}  # fmt: skip
_DEFAULT = (
    "revision", "wandb", "reading", "taps", "merge", "prompt_text", "doctor_lengths", "server", "server_model",
    "server_timeout", "server_retries", "concurrency", "device_map", "wheel", KWARGS,
)  # fmt: skip
_MODELS = {
    "target": TARGET, "tokenizer": TARGET, SMALL_LM: SMALL_LM, "path": SMALL_LM, EAGLE3: EAGLE3, TABLE: TABLE,
    "checkpoint": EARLY_EXIT, "start": EARLY_EXIT,
}  # fmt: skip
_LIBRARY = SourceConfig(layout="code", max_records=10)  # replaces a source
_STAYING_RECORDS = 40  # of a source that stays
DRAFTERS = ("checkpoint", SMALL_LM, EAGLE3)  # whose training records may name the prompts' template


def rehearsable(run: Callable[[Config], None]) -> Callable[[Config], None]:
    """The command `run`; with debug=true it runs `small` settings instead of `config`."""

    @functools.wraps(run)
    def run_or_rehearse(config: Config) -> None:
        return _rehearse(run, config) if config.debug else run(config)

    return run_or_rehearse


def _rehearse(run: Callable[[Config], None], config: Config) -> None:
    """`run` with the small settings of `config`, after making the models that they need.

    First the inputs given on the command line are checked (see `read_some`). The tiny models have the architecture of
    the given target, else a Llama's. Everything is written to `<out_dir>-debug`, which is locked against other runs
    and, unless resume=true, emptied first. The run's out_dir is `run` in it. All processes of a launcher call this.

    Raises `UserError` if that folder has other content or is in use by another run, and for unusable inputs.
    """
    from outrider.base.processes import from_main, join_processes, only_run_of
    from outrider.draft_models.tiny.models import save_tiny_models  # imports torch, which some commands do not need

    folder, state = rehearsal_folder(config.out_dir), join_processes()
    from_main(state, lambda: None if config.resume else require_rehearsal(folder, MODELS))
    models, out_dir = folder / MODELS, folder / "run"

    def prepare() -> None:
        target = read_some(config, config.gives)
        if not config.resume:
            clear(folder)
        architecture = save_tiny_models(models, target)
        print(f"debug target={models / TARGET} architecture={architecture} out_dir={out_dir}", flush=True)

    with only_run_of(state, require_writable(folder), "a debug run"):
        from_main(state, prepare)
        run(replace(small(config, folder, models), debug=False, out_dir=str(out_dir)))


def small(config: Small, folder: Path, models: Path | None = None) -> Small:
    """`config` at almost no cost: small numbers, no network, a few rows of text.

    models: the folder that `save_tiny_models` wrote; its models replace all others. None: `config` is a step of the
    pipeline in `folder`. Then the target and the pipeline's own models and texts stay. Other drafters are removed, with
    the methods that need them.
    """
    if getattr(config, "file", None) is not None:  # prompts of a user's file: all of them
        return config
    changes, data = dict[str, Any](), getattr(config, "data", None)
    most = {**_MOST, **(_OF_STEPS if models is None else {})}
    if not (models is None and isinstance(data, DataConfig) and _has_answers(data, folder)):
        most["seq_len"] = _MOST["seq_len"]
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if name in _DEFAULT:
            changes[name] = field.default if field.default_factory is MISSING else field.default_factory()
        elif isinstance(value, DataConfig):
            changes[name] = _some_text(value, folder, models, asks=getattr(config, "asks", False))
        elif isinstance(value, Settings):
            changes[name] = small(value, folder, models)
        elif name == "target" or (name in _MODELS and isinstance(value, str)):
            changes[name] = _model(config, name, value, folder, models)
        elif name == "features" and value not in (None, "auto"):
            changes[name] = str(folder / name)
        elif name == "prompts" and isinstance(value, str):
            changes[name] = value if models is None and _is_in(folder, value) else "python_stdlib"
        elif name in _SET or (name in _GIVEN and value is not None):
            changes[name] = {**_SET, **_GIVEN}[name]
        elif name in most and isinstance(value, int | float) and not isinstance(value, bool):
            changes[name] = min(value, most[name])
    if "path" in changes and changes["path"] is None:  # the small LM to continue is removed: train a new one
        changes |= {"layers": 1, **_GIVEN}
    if isinstance(config, EvaluateConfig):
        gone = {kind.name for kind in KINDS.values() if kind.option and changes.get(kind.option, "") is None}
        methods = {name: method for name, method in config.methods.items() if models or method.source not in gone}
        changes["methods"] = {name: replace(method, skip=None) for name, method in methods.items()}
    return replace(config, **changes)


def _model(config: Settings, name: str, value: str | None, folder: Path, models: Path | None) -> str | None:
    """The replacement of a model that the option `name` gives."""
    if models is None:
        return value if name in ("target", "tokenizer") or _is_in(folder, str(value)) else None
    if name == "start" and hasattr(config, "draft_steps"):
        return str(models / EAGLE3)
    held = kind_in(str(value)) if name == "checkpoint" else None
    return str(models / _MODELS.get(str(held and held.option), _MODELS[name]))


def _some_text(data: DataConfig, folder: Path, models: Path | None, *, asks: bool) -> DataConfig:
    """`data` with a few library files instead of each source, or a few records of a source that stays."""

    def reduced(source: Source) -> Source:
        if models is None and _stays(source, folder):
            return replace(source, max_records=min(_STAYING_RECORDS, source.max_records or _STAYING_RECORDS))
        return replace(source, **vars(_LIBRARY))

    heldout = 0.5
    if models is None and _has_answers(data, folder):  # all prompts are answered; some of the answers are held out
        heldout = data.heldout_fraction if asks else 0.3
    mix = {name: reduced(part) for name, part in data.mix.items()}
    text = replace(data, mix=mix) if mix else reduced(data)
    return replace(text, heldout_fraction=heldout, cache_dir=str(folder / "cache"))


def _has_answers(data: DataConfig, folder: Path) -> bool:
    """Whether some of it is what earlier steps of the pipeline in `folder` wrote."""
    sources: list[SourceConfig] = [*data.mix.values()] or [data]
    return any(_stays(source, folder) for source in sources)


def _stays(source: SourceConfig, folder: Path) -> bool:
    """Whether `path` lies in the pipeline's `folder`."""
    return source.source == "local" and all(_is_in(folder, path) for path in source.path)


def _is_in(folder: Path, path: str) -> bool:
    return Path(path).absolute().is_relative_to(folder.absolute())


def read_some(config: Any, is_checked: Callable[[str], bool]) -> "PreTrainedConfig | None":
    """The config of the target in a command's settings; None if they have no target, or it is not wanted.

    Also reads the target's tokenizer, and one record of the data and of the prompts, rendered as the command would.
    is_checked: whether to check the option with this dotted key. Raises `UserError` for unusable inputs.
    """
    target, tokenizer = None, None
    if getattr(config, "target", None) is not None and is_checked("target"):
        from outrider.draft_models.targets.open_target import open_target  # imports torch, as above

        target = open_target(config.target, config.revision, by_layers=getattr(config, "by_layers", False))
        tokenizer = target.tokenizer
    encoder = getattr(config, "tokenizer", None)
    if encoder is not None and is_checked("tokenizer"):
        open_encoder(encoder, config.revision)
    corpus: DataConfig | None = getattr(config, "data", None)
    sources = [] if corpus is None else [(f"data.mix.{name}", part) for name, _, part in corpus.parts()]
    for key, data in sources or ([] if corpus is None else [("data", corpus)]):
        bound = tokenizer and with_arguments(tokenizer, data.chat_template_kwargs, data.template, f"{key}.{KWARGS}")
        if is_checked(f"{key}.path"):
            _read_record(key, data, bound, asking=getattr(config, "asks", False))
        elif bound is not None and data.layout not in ("auto", "text", "code"):  # conversations, not written yet
            render_prompt(("a question",), bound, data.template, f"{key}.template")
    prompts = getattr(config, "prompts", None)  # a number in the settings of calibrate
    if isinstance(prompts, str) and prompts != "python_stdlib" and is_checked("prompts"):
        _read_prompt(config, tokenizer)
    return None if target is None else target.config


def _read_record(key: str, data: DataConfig, tokenizer: "PreTrainedTokenizerBase | None", *, asking: bool) -> None:
    counts = Counts()
    splits = (read_records(data, split, counts, asking=asking) for split in ("train", "heldout"))
    for record in chain.from_iterable(splits):
        with counts.refusing():
            if tokenizer is None:
                return
            if "messages" in record:
                users = [i for i, message in enumerate(record["messages"]) if message["role"] == "user"]
                first = record["messages"][: users[0] + 1] if users else ("a question",)
                render_prompt(first, tokenizer, data.template, f"{key}.template", where=record["id"])
            if not asking:
                encode([record], tokenizer, data.template)
            return
    raise UserError(f"{key}: no usable record in path={list(data.path)}; the first: {counts.first or 'none'}")


def _read_prompt(config: Any, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    (prompt,) = read_prompts(config.prompts, limit=1)
    by_record = config.template == "auto" and any(getattr(config, key) for key in DRAFTERS)
    if tokenizer is not None and prompt.chat and (tokenizer.chat_template or not by_record):
        tokenizer = with_arguments(tokenizer, config.chat_template_kwargs, config.template)
        render_prompt(prompt.messages(prompt.turns[:1]), tokenizer, config.template)

"""debug=true: the same command on tiny random models and a few rows, without a network; the inputs are checked first.

`rehearse` checks the inputs of the command line (`check_inputs`), writes tiny models, and runs the command with small
settings (`shrink`). A pipeline with debug=true calls `shrink` for each of its steps instead: a step reads the models
and texts that earlier steps wrote, which are small already.

The mark of an option, `debug=` of `outrider.base.settings.opt`, says what `shrink` makes of the option. Example of
`outrider eesd`, whose out_dir is runs/a and whose `seq_len` has the mark 64 and `target` the mark TinyModel("target"):

    target=Qwen/Qwen3-8B seq_len=2048 data.source=local data.path=[chats.jsonl] out_dir=runs/a
    target=runs/a-debug/tiny_models/target seq_len=64 data.layout=code data.max_records=10 out_dir=runs/a-debug/run
"""

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.base.errors import UserError
from outrider.base.files import require_writable
from outrider.base.run_dirs import clear, rehearsal_folder, require_rehearsal
from outrider.base.settings import Config, RunConfig, Settings, covers, debug_value
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.records import Counts
from outrider.data_prep.text.settings import DataConfig, SourceConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.targets.encoder import open_encoder
from outrider.draft_models.targets.settings import (
    DFLASH,
    EAGLE3,
    EARLY_EXIT,
    MTP,
    SMALL_LM,
    TARGET,
    TargetOrTokenizer,
    TinyModel,
)
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS, kind_in

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

MODELS = "tiny_models"
Run = TypeVar("Run", bound=RunConfig)
Source = TypeVar("Source", bound=SourceConfig)
_LIBRARY = SourceConfig(layout="code", max_records=10)  # files of Python's library, which replace a source
_PIPELINE_RECORDS = 40  # at most, of a source that the pipeline wrote
DRAFTERS = ("checkpoint", SMALL_LM, EAGLE3, MTP, DFLASH)  # whose training records may name the prompts' template


def rehearse(run: Callable[[Run], object], config: Run, typed_keys: Collection[str] = ()) -> None:
    """`run` with `config` made small, after making the tiny models that it needs.

    First the inputs given on the command line by `typed_keys` are checked (see `check_inputs`). The tiny models have
    the architecture of the given target, else a Llama's. Everything is written to `<out_dir>-debug`, which is locked
    against other runs and, unless resume=true, emptied first. The run's out_dir is `run` in it. All processes of a
    launcher call this. Raises `UserError` if that folder has other content or is in use, and for unusable inputs.
    """
    from outrider.base.processes import from_main, join_processes, only_run_of
    from outrider.draft_models.tiny.models import save_tiny_models  # imports torch, which some commands do not need

    debug_dir, processes = rehearsal_folder(config.out_dir), join_processes()
    from_main(processes, lambda: None if config.resume else require_rehearsal(debug_dir, MODELS))
    model_dir, out_dir = debug_dir / MODELS, debug_dir / "run"

    def save_models() -> None:
        target = check_inputs(config, lambda key: covers(typed_keys, key))
        if not config.resume:
            clear(debug_dir)
        architecture = save_tiny_models(model_dir, target)
        print(f"debug target={model_dir / TARGET} architecture={architecture} out_dir={out_dir}", flush=True)

    with only_run_of(processes, require_writable(debug_dir), "a debug run"):
        from_main(processes, save_models)
        changes: dict[str, Any] = {"debug": False, "out_dir": str(out_dir)}
        run(replace(shrink(config, debug_dir, model_dir), **changes))


def shrink(config: Config, folder: Path, model_dir: Path | None = None) -> Config:
    """`config` at almost no cost: small numbers, no network, a few rows of text.

    model_dir: the folder that `save_tiny_models` wrote; its models replace all others. None: `config` is a step of the
    pipeline in `folder`. Then the target and the pipeline's own models and texts stay. Other drafters are removed, with
    the methods that need them.
    """
    changes, changes_without_models = dict[str, object](), dict[str, object]()
    data = getattr(config, "data", None)
    reads_pipeline_text = model_dir is None and (not isinstance(data, DataConfig) or _has_source_in(folder, data))
    for option in fields(config):
        name, value = option.name, getattr(config, option.name)
        debug_spec = option.metadata.get("debug")
        if config.disabled_by(name) or (model_dir is None and isinstance(value, str) and _is_in(folder, value)):
            continue  # another option turns this one off, or the pipeline wrote what it names
        if isinstance(value, DataConfig):
            changes[name] = _shrink_data(value, folder, model_dir, asks=getattr(config, "asks", False))
        elif isinstance(debug_spec, TinyModel):
            if model_dir is not None and value is not None:
                changes[name] = _tiny_model(debug_spec, value, model_dir)
            elif value is not None and debug_spec.name != TARGET:  # a drafter that the pipeline did not train
                changes[name] = None
                changes_without_models |= debug_spec.without  # values of other options without this model
        elif debug_spec is None and isinstance(value, Settings):
            changes[name] = shrink(value, folder, model_dir)
        else:
            changes[name] = debug_value(option, value, step=reads_pipeline_text)
    if isinstance(config, EvaluateConfig):  # removed: kinds whose model became None above
        removed = {kind.name for kind in KINDS.values() if kind.option and changes.get(kind.option, "") is None}
        methods = {name: method for name, method in config.methods.items() if model_dir or method.source not in removed}
        changes["methods"] = {name: shrink(method, folder, model_dir) for name, method in methods.items()}
    return replace(config, **changes | changes_without_models)


def _tiny_model(mark: TinyModel, model_path: str, model_dir: Path) -> str:
    """The tiny model that replaces the model in `model_path`, of the same kind if the option takes any kind."""
    kind = kind_in(model_path) if mark.any_kind else None
    dir_name = mark.name if kind is None or kind.name == EARLY_EXIT or kind.option is None else kind.option
    return str(model_dir / dir_name)


def _shrink_data(data: DataConfig, folder: Path, model_dir: Path | None, *, asks: bool) -> DataConfig:
    """`data` with library files instead of each source; in a step of the pipeline, a few records of a source that the
    pipeline wrote. asks: its records are prompts. Without a pipeline half of the text is held out."""
    is_step = model_dir is None

    def shrink_source(source: Source) -> Source:
        if is_step and _is_source_in(folder, source):
            record_limit = min(_PIPELINE_RECORDS, source.max_records or _PIPELINE_RECORDS)
            return replace(source, max_records=record_limit, share=1.0)
        return replace(source, **vars(_LIBRARY))

    heldout_share = 0.5
    if is_step and _has_source_in(folder, data):  # all prompts are answered; some of the answers are held out
        heldout_share = data.heldout_fraction if asks else 0.3
    mix = {name: shrink_source(mix_source) for name, mix_source in data.mix.items()}
    small_data = replace(data, mix=mix) if mix else shrink_source(data)
    return replace(small_data, heldout_fraction=heldout_share, cache_dir=str(folder / "cache"))


def _has_source_in(folder: Path, data: DataConfig) -> bool:
    """Whether a source of `data` is in `folder`."""
    return any(_is_source_in(folder, source) for source in data.mix.values() or [data])


def _is_source_in(folder: Path, source: SourceConfig) -> bool:
    return source.source == "local" and all(_is_in(folder, path) for path in source.path)


def _is_in(folder: Path, path: str) -> bool:
    return Path(path).absolute().is_relative_to(folder.absolute())


def check_inputs(config: Any, is_checked: Callable[[str], bool]) -> "PreTrainedConfig | None":
    """The config of the target in a command's settings; None if they have no target, or it is not checked. Also reads
    the target's tokenizer, and one record of the data and of the prompts, rendered as the command would. is_checked:
    whether to check the option with this dotted key. Raises `UserError` for unusable inputs."""
    target, tokenizer = None, None
    tokenizer_source = getattr(config, "tokenizer", None)
    if reads_encoder := tokenizer_source is not None and is_checked("tokenizer"):
        open_encoder(tokenizer_source, config.revision)
    is_unseen = reads_encoder and isinstance(config, TargetOrTokenizer)
    if is_unseen or (getattr(config, "target", None) is not None and is_checked("target")):
        from outrider.draft_models.targets.unseen_target import open_given  # imports torch, as above

        opened_target = open_given(config, by_layers=getattr(config, "by_layers", False))
        target, tokenizer = None if is_unseen else opened_target, opened_target.tokenizer
    data: DataConfig | None = getattr(config, "data", None)
    sources = [] if data is None else [(f"data.mix.{name}", part) for name, _, part in data.parts()] or [("data", data)]
    for key, part in sources:
        _check_source(key, part, tokenizer, is_checked, asking=getattr(config, "asks", False))
    prompts_option = getattr(config, "prompts", None)  # a number in the settings of calibrate
    if isinstance(prompts_option, str) and prompts_option != "python_stdlib" and is_checked("prompts"):
        _check_prompt(config, tokenizer)
    return None if target is None else target.config


def _check_source(
    key: str,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase | None",
    is_checked: Callable[[str], bool],
    *,
    asking: bool,
) -> None:
    """Check one source of data, the settings below `key`: a record of it, or its template if it is not written yet.

    asking: its records are prompts, without answers.
    """
    if tokenizer is not None:
        tokenizer = bind_arguments(tokenizer, data.chat_template_kwargs, data.template, f"{key}.{KWARGS}")
    if is_checked(f"{key}.path"):
        _check_record(key, data, tokenizer, asking=asking)
    elif tokenizer is not None and data.layout not in ("auto", "text", "code"):  # conversations, not written yet
        render_prompt(("a question",), tokenizer, data.template, f"{key}.template")


def _check_record(key: str, data: DataConfig, tokenizer: "PreTrainedTokenizerBase | None", *, asking: bool) -> None:
    """Render and encode the first usable record. Raises `UserError` if there is none."""
    counts = Counts()
    record_streams = (read_records(data, split, counts, asking=asking) for split in ("train", "heldout"))
    for record in chain.from_iterable(record_streams):
        with counts.count_refused():
            if tokenizer is None:
                return
            if "messages" in record:
                user_indices = [i for i, message in enumerate(record["messages"]) if message["role"] == "user"]
                first_messages = record["messages"][: user_indices[0] + 1] if user_indices else ("a question",)
                render_prompt(first_messages, tokenizer, data.template, f"{key}.template", where=record["id"])
            if not asking:
                encode([record], tokenizer, data.template)
            return
    raise UserError(f"{key}: no usable record in path={list(data.path)}; the first: {counts.first or 'none'}")


def _check_prompt(config: Any, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Read the first prompt, and render it unless the record of a drafter's training may name its template."""
    (prompt,) = read_prompts(config.prompts, limit=1)
    may_have_record = config.template == "auto" and any(getattr(config, key) for key in DRAFTERS)
    if tokenizer is not None and prompt.chat and (tokenizer.chat_template or not may_have_record):
        tokenizer = bind_arguments(tokenizer, config.chat_template_kwargs, config.template)
        render_prompt(prompt.messages(prompt.turns[:1]), tokenizer, config.template)

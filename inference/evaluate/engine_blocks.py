"""The two arms of an evaluation in a serving engine: plain decoding and drafting there, in turn, on the same prompts.

The engine runs in processes that this module starts, one without a drafter and one with (`EngineProcess`), or is a
server that runs already (`EngineServer`). It continues blocks, which are some of the prompts at one concurrency. A
block is stored when it is measured (`served.jsonl`), so a stopped run can be continued.

Example: 24 prompts, concurrency=[1,4], repeats=1 → 24 blocks of one prompt, then 2 blocks of 12 (`block_keys`).
"""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from outrider.base.errors import require
from outrider.base.progress import track_progress
from outrider.base.settings import require_defaults
from outrider.base.streams import Streams
from outrider.draft_models.formats.convert import write_safetensors
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE
from outrider.inference.batch.server import Json
from outrider.inference.core.rounds import Generation
from outrider.inference.evaluate.engine_server import EngineServer
from outrider.inference.loading.drafters import context_length
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.measure.results import PromptResult, append_line, read_lines
from outrider.inference.measure.threads import load_average
from outrider.inference.report.types import DRAFTED, PLAIN
from outrider.inference.serving.engine_process import EngineProcess, require_engine, start_engine
from outrider.inference.serving.proposer import PROPOSER, environment
from outrider.inference.settings.engine import MODULES, EngineConfig, draft_length, python_in, refusal_of
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import AUTOREGRESSIVE, MethodConfig
from outrider.inference.settings.sampling import GREEDY, SamplingConfig

FILE = "served.jsonl"
FOLDER = "engine"  # folder of drafters in the engine's format, of its logs, and of the audited texts
_WARM_UP_TOKENS = 8
_TURNS = 3  # prompts in a block for each of several concurrent requests
Arm = EngineProcess | EngineServer


@dataclass(frozen=True)
class BlockKey:
    """The identity of a block. engine: its name, Python and options, as JSON; positions: of the prompts in the run."""

    engine: str
    method: str
    concurrency: int
    repeat: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Prompts that an engine continued in both arms, without a drafter and with one. A lone server is one arm.

    version: of the engine. load: of the machine when the block ended. results: a repeat counts as one more turn of a
    prompt. seconds: by arm, of all prompts together. counts: the rounds of a server, and how many of them accepted at
    least 1, 2, … drafted tokens; None if the results have the rounds, empty if the server tells neither.
    """

    key: BlockKey
    version: str
    results: tuple[PromptResult, ...]
    seconds: Mapping[str, float]
    load: float | None
    counts: tuple[int, ...] | None = None


def require_served(config: EngineConfig, setup: TargetSetup, n_prompts: int, process_count: int = 1) -> None:
    """Raise `UserError` if the engine of `config` is not there, or cannot run this target on `n_prompts` prompts."""
    max_requests, devices = max(config.concurrency), ("cpu",) if config.engine == "openvino" else ("cpu", "cuda")
    require(max_requests <= n_prompts, "concurrency", max_requests, f"at most {n_prompts}, the number of prompts")
    require(process_count == 1, "engine", config.engine, f"null with {process_count} processes: an engine has its own")
    field_names = sorted({*setup.inherited.fields} - {"repetition_penalty"})  # which requests have
    require(not field_names, "generation_config", field_names, "none with engine=: the engine has no such processors")
    if config.engine not in MODULES:  # the URL of a server, which must answer
        for method in (None, *(m for m in config.methods.values() if refusal_of(config.engine, m) is None)):
            _open_engine(config, setup, max_tokens=0, engine_dir=Path(), name="", method=method)  # unread
        return
    expected = f"{' or '.join(devices)} with engine={config.engine} (CUDA_VISIBLE_DEVICES chooses a GPU)"
    require(str(setup.device) in devices, "device", str(setup.device), expected)
    prefix = setup.target.files.wrapper_prefix  # of all stored names, if a wrapper of the model was saved; "": none
    require(not prefix, "target", setup.target.source, f"tensors without {prefix!r} before their names with engine=")
    require_engine(config.engine, python_in(config.engine_python))


def served_methods(config: EngineConfig) -> dict[str, MethodConfig]:
    """The methods that the engine of `config` can run. Prints the others."""
    refusals = {name: refusal_of(config.engine, method) for name, method in config.methods.items()}
    for name, reason in refusals.items():
        if reason is not None:
            print(f"engine={config.engine} method={name} runs=no reason={reason!r}", flush=True)
    return {name: method for name, method in config.methods.items() if refusals[name] is None}


def measure_served(
    config: EngineConfig,
    setup: TargetSetup,
    methods: Mapping[str, MethodConfig],
    prompt_tokens: Sequence[Sequence[int]],
    prompt_indices: Sequence[int],
    out_dir: Path,
) -> list[Block]:
    """The blocks of `methods` on the prompts `prompt_indices`, stored ones included. Raises `UserError`."""
    engine_dir, blocks_file = out_dir / FOLDER, out_dir / FILE
    block_by_key = {block.key: block for block in read_lines(blocks_file, Block)} if blocks_file.exists() else {}
    request = _request_of(config, resolve_sampling(config, setup), setup.eos)
    streams = Streams(config.seed).within("served")
    open_engine = partial(_open_engine, config, setup, max(map(len, prompt_tokens)) + config.max_new_tokens, engine_dir)
    blocks = []
    with ExitStack() as engine_stack:
        plain_engine: Arm | None = None
        for name, method in methods.items():
            keys = [*block_keys(config, name, prompt_indices)]
            missing_keys = [key for key in keys if key not in block_by_key]
            if missing_keys:
                plain_engine = plain_engine or engine_stack.enter_context(open_engine("plain", None))
                with open_engine(name, method) as drafting_engine:
                    engines = {PLAIN: (plain_engine, 0), DRAFTED: (drafting_engine, draft_length(method))}
                    arms = {arm: (engine, length) for arm, (engine, length) in engines.items() if engine is not None}
                    for key in track_progress(missing_keys, f"measuring {name} in {config.engine}", "blocks"):
                        block_by_key[key] = _measure_block(arms, key, prompt_tokens, request, streams)
                        append_line(blocks_file, asdict(block_by_key[key]))
            blocks += [block_by_key[key] for key in keys]
    return blocks


def block_keys(config: EngineConfig, method: str, prompt_indices: Sequence[int]) -> Iterator[BlockKey]:
    """All blocks of a method. A block has at least as many prompts as requests run at a time."""
    engine_location = config.engine_plain or config.engine_python
    engine_json = json.dumps([config.engine, engine_location, config.engine_options], sort_keys=True)
    for concurrency in config.concurrency:
        block_count = len(prompt_indices) if concurrency == 1 else max(1, len(prompt_indices) // (_TURNS * concurrency))
        block_edges = [len(prompt_indices) * block_number // block_count for block_number in range(block_count + 1)]
        for repeat in range(config.repeats):
            for start, end in pairwise(block_edges):
                yield BlockKey(engine_json, method, concurrency, repeat, tuple(prompt_indices[start:end]))


def _measure_block(
    arms: Mapping[str, tuple[Arm, int]],
    key: BlockKey,
    all_prompt_tokens: Sequence[Sequence[int]],
    shared_fields: Json,
    streams: Streams,
) -> Block:
    """Measure one block, by both arms in random order. Before its first block at a concurrency an arm warms up: it
    continues the same prompts by a few tokens. arms: by name, the engine and the length of its drafts, 0 for plain
    decoding. shared_fields: the request's fields that all blocks have."""
    concurrency, prompts = key.concurrency, [all_prompt_tokens[prompt_index] for prompt_index in key.positions]
    block_streams = streams.within(key.method, concurrency, key.repeat)
    seeds = [block_streams.number(prompt_index, bits=56) for prompt_index in key.positions]
    request = {**shared_fields, "seeds": seeds, "concurrency": concurrency}
    outputs, seconds_by_arm = dict[str, tuple[Generation, ...]](), dict[str, float]()
    for arm in block_streams.of("order", *key.positions).sample(sorted(arms), len(arms)):
        engine, draft_len = arms[arm]
        if engine.warm != concurrency:
            warm_up_tokens = min(_WARM_UP_TOKENS, request["max_new_tokens"])
            engine.continue_prompts(prompts, {**request, "max_new_tokens": warm_up_tokens}, draft_len)
            engine.warm = concurrency
        outputs[arm], seconds_by_arm[arm] = engine.continue_prompts(prompts, request, draft_len)
    by_method = {name: outputs[arm] for arm, name in ((PLAIN, AUTOREGRESSIVE), (DRAFTED, key.method)) if arm in arms}
    results = tuple(
        PromptResult(
            prompt_id=f"{prompt_index}/{key.repeat}", category="", prompt=tuple(prompts[i]),
            generations={name: method_texts[i] for name, method_texts in by_method.items()},
            reference=next(iter(by_method)), conversation=str(prompt_index),
        )
        for i, prompt_index in enumerate(key.positions)
    )  # fmt: skip
    return Block(key, arms[DRAFTED][0].version, results, seconds_by_arm, load_average(), arms[DRAFTED][0].counts)


def resolve_sampling(config: EngineConfig, setup: TargetSetup) -> SamplingConfig:
    """How tokens are chosen, the target's own repetition penalty included."""
    inherited_penalty = setup.inherited.fields.get("repetition_penalty")
    return replace(config.sampling, repetition_penalty=config.sampling.repetition_penalty or inherited_penalty)


def _request_of(config: EngineConfig, sampling: SamplingConfig, eos: Collection[int]) -> Json:
    """The fields that all requests have. Greedy decoding reads only the penalty of `sampling`."""
    names = [name for name in vars(sampling) if name != "temperature" and (sampling.temperature or "penalty" in name)]
    options = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(GREEDY, name)}
    return {"max_new_tokens": config.max_new_tokens, "eos": sorted(eos), "temperature": sampling.temperature,
            "sampling": options}  # fmt: skip


def _open_engine(
    config: EngineConfig, setup: TargetSetup, max_tokens: int, engine_dir: Path, name: str, method: MethodConfig | None
) -> AbstractContextManager[Arm | None]:
    """An engine, with the drafter of `method` if it is given. None: there is no second server, which does not draft.

    max_tokens: of the longest text. engine_dir, name: of the engine's log; the drafter is in engine_dir too.
    """
    if config.engine not in MODULES:
        url_option, length = ("engine_plain", 0) if method is None else ("engine", draft_length(method))
        return nullcontext(EngineServer(config, setup, url_option, length) if getattr(config, url_option) else None)
    draft, env_vars = None, {"CUDA_VISIBLE_DEVICES": ""} if setup.device.type == "cpu" else dict[str, str]()
    if method is not None:
        kind, drafter_model = KINDS[method.source], _export_drafter(config, setup, method, engine_dir)
        if drafter_model == PROPOSER:  # our n-gram table, which vLLM imports as a module
            env_vars |= environment(Path(str(config.where(kind))).resolve())
        drafter_path, plugin = config.where(kind), config.plugin(kind)
        name_in_vllm = (drafter_path and plugin.vllm_method(drafter_path, setup.target)) or kind.vllm_method
        draft = {"method": name_in_vllm, "tokens": draft_length(method), "model": drafter_model}
        draft["max_ngram"] = method.max_ngram
    target_source, revision = _weights_for_engines(setup, engine_dir)
    job = {  # context: the most tokens of a text, with some to spare; most: requests at a time
        "engine": config.engine, "target": target_source, "revision": revision, "dtype": setup.floats,
        "device": setup.device.type, "context": min(max_tokens + 64, context_length(setup.config, {})), "draft": draft,
        "options": config.engine_options, "work": str(engine_dir.resolve()), "most": max(config.concurrency),
    }  # fmt: skip
    return start_engine(python_in(config.engine_python), job, engine_dir / f"{name}.log", env_vars)


def _weights_for_engines(setup: TargetSetup, engine_dir: Path) -> tuple[str, str | None]:
    """(directory or Hub name, revision) of the target as engines load it. Other formats are saved as safetensors."""
    if (original := setup.target.files.original) is None:
        return setup.target.source, setup.target.revision
    target_dir = engine_dir.resolve() / "target"
    if not (target_dir / CONFIG_FILE).exists():
        write_safetensors(original, target_dir, dtype=setup.dtype, remedy="free space")
    return str(target_dir), None


def export_drafters(config: EngineConfig, setup: TargetSetup, out_dir: Path, *, anew: bool = False) -> None:
    """Write the drafters that the engine of `config` loads. anew: those that are there are replaced. Raises `UserError`
    for one that no engine runs."""
    (out_dir / FOLDER).mkdir(exist_ok=True)
    for kind_name in {method.source for method in config.methods.values()} if anew else ():
        shutil.rmtree(out_dir / FOLDER / kind_name, ignore_errors=True)
    for method in config.methods.values():
        if config.engine in MODULES and refusal_of(config.engine, method) is None:
            _export_drafter(config, setup, method, out_dir / FOLDER)


def _export_drafter(config: EngineConfig, setup: TargetSetup, method: MethodConfig, engine_dir: Path) -> str | None:
    """What an engine loads to draft by `method`: our module, or the directory of a drafter. None: nothing."""
    kind, export_dir = KINDS[method.source], engine_dir.resolve() / method.source
    if (drafter_path := config.where(kind)) is None or kind.vllm_method == "custom_class":
        return drafter_path and PROPOSER  # None without a path: the engine needs none
    if kind.in_target and drafter_path == setup.target.source and setup.target.files.original is None:
        require_defaults(config, ("reading",), f"the engine reads the {kind.name} head in the target itself")
        return drafter_path
    if not export_dir.exists():
        partial_dir = export_dir.with_suffix(".part")  # a stopped run may have left one
        config.plugin(kind).export(drafter_path, setup.target, setup.dtype, partial_dir)
        save_parts(partial_dir, setup.tokenizer)  # engines load it with the drafter
        partial_dir.rename(export_dir)
    return str(export_dir)

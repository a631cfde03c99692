"""The arms of an evaluation in a serving engine: plain decoding and drafting there, in turn, on the same prompts.

The engine runs in processes of its own, one without a drafter and one with, and continues blocks of prompts. Blocks are
stored as they are measured (`served.jsonl`), so a stopped run can be continued.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from data_prep.formats.door import as_safetensors
from inference.core.generation import Generation
from inference.core.stopwatch import Round
from inference.drafters.ngram.ngrams import open_table
from inference.loading.targets import TargetSetup, context_length, load_plain
from inference.measure.prompt_results import append_line, read_lines
from inference.measure.results import AUTOREGRESSIVE, PromptResult
from inference.report.served import Row, served_row
from inference.serving.engine_process import Asked, EngineProcess
from inference.serving.proposer import TABLE_VARIABLE, NgramProposer, chain_rounds
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS
from inference.settings.method import MethodConfig
from inference.settings.serving import draft_length, python_in, why_not
from outrider.errors import require
from outrider.progress import Stage, counted
from outrider.streams import Streams

FILE = "served.jsonl"
FOLDER = "engine"  # of drafters as the engine loads them, and of its logs
_WARM_UP_TOKENS = 8
LEVEL = 0.001  # how often sampled texts may be refused by chance
_TURNS = 3  # prompts of a block for each request at a time, where there are several


@dataclass(frozen=True)
class BlockKey:
    """What is measured once. options: of the engine, as JSON; positions: of the block's prompts in the run."""

    options: str
    method: str
    concurrency: int
    repeat: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Prompts that an engine continued twice, without a drafter and with one; seconds: of all of them together."""

    key: BlockKey
    engine: str  # with its version
    plain: tuple[Generation, ...]
    drafted: tuple[Generation, ...]
    plain_seconds: float
    drafted_seconds: float


def served_methods(config: EvaluateConfig) -> dict[str, MethodConfig]:
    """The methods that the engine of `config` runs; empty without one. Says which it cannot run."""
    if config.engine is None:
        return {}
    reasons = {name: why_not(config.engine, method) for name, method in config.methods.items()}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"engine={config.engine} method={name} runs=no reason={reason!r}", flush=True)
    return {name: method for name, method in config.methods.items() if reasons[name] is None}


def measure_served(
    config: EvaluateConfig, setup: TargetSetup, rendered: Sequence[Sequence[int]], positions: Sequence[int], out: Path
) -> list[Block]:
    """The blocks of all methods that the engine runs, on the prompts `positions`. Raises `UserError`."""
    folder = out / FOLDER
    folder.mkdir(exist_ok=True)
    methods, file = served_methods(config), out / FILE
    done = {block.key: block for block in read_lines(file, Block)} if file.exists() else {}
    asked = _asked(config, setup)
    begin = partial(_begin, config, setup, max(map(len, rendered)) + config.max_new_tokens, folder)
    found = []
    with ExitStack() as running:
        plain: EngineProcess | None = None
        for name, method in methods.items():
            todo = [*_keys(config, name, positions)]
            missing = [key for key in todo if key not in done]
            if missing:
                plain = plain or running.enter_context(begin("plain", None))
                with begin(name, method) as drafted:
                    arms = (plain, 0), (drafted, draft_length(method))
                    for key in counted(missing, f"measuring {name} in {config.engine}", "blocks"):
                        done[key] = _measure(arms, key, rendered, asked)
                        append_line(file, done[key])
            found += [done[key] for key in todo]
    return found


def _keys(config: EvaluateConfig, method: str, positions: Sequence[int]) -> Iterator[BlockKey]:
    """All blocks of a method."""
    options = json.dumps({"engine": config.engine, **config.engine_options}, sort_keys=True)
    for count in config.concurrency:
        size = 1 if count == 1 else _TURNS * count
        for repeat in range(config.repeats):
            for start in range(0, len(positions), size):
                yield BlockKey(options, method, count, repeat, tuple(positions[start : start + size]))


def _measure(
    arms: Sequence[tuple[EngineProcess, int]], key: BlockKey, rendered: Sequence[Sequence[int]], asked: Asked
) -> Block:
    """One block, with both arms in random order; a first one with few tokens warms them up."""
    count, prompts = key.concurrency, [rendered[position] for position in key.positions]
    made: dict[int, tuple[tuple[Generation, ...], float]] = {}
    for place in random.Random(repr(key)).sample(range(2), 2):
        engine, drafted = arms[place]
        if engine.warm != count:
            few = Asked(min(_WARM_UP_TOKENS, asked.max_new_tokens), asked.eos, asked.sampling, asked.seed)
            engine.continued(prompts, few, count, drafted)
            engine.warm = count
        made[place] = engine.continued(prompts, asked, count, drafted)
    (plain, plain_seconds), (drafted_texts, seconds) = made[0], made[1]
    return Block(key, arms[1][0].version, plain, drafted_texts, plain_seconds, seconds)


def _asked(config: EvaluateConfig, setup: TargetSetup) -> Asked:
    sampling = config.sampling
    penalty = setup.inherited.taken.get("repetition_penalty", 1.0)
    others = sorted({*setup.inherited.taken} - {"repetition_penalty"})
    require(not others, "generation_config", others, "none with engine=: the engine has no such processors")
    said: dict[str, float] = {"temperature": sampling.temperature, "repetition_penalty": penalty}
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    said |= {name: getattr(sampling, name) for name, value in off.items() if getattr(sampling, name) != value}
    return Asked(config.max_new_tokens, sorted(setup.eos), said, config.seed)


def _begin(
    config: EvaluateConfig, setup: TargetSetup, longest: int, folder: Path, name: str, method: MethodConfig | None
) -> EngineProcess:
    """A running engine, with the drafter of `method` if it is given."""
    draft, environment = None, dict[str, str]()
    if method is not None:
        kind, tokens = KINDS[method.source], draft_length(method)
        where = config.where(kind)
        draft = {"method": kind.served, "tokens": tokens, "max_ngram": method.max_ngram, "model": None}
        if kind.served == "custom_class":
            assert where is not None
            draft["model"] = f"{NgramProposer.__module__}.{NgramProposer.__name__}"
            root = str(Path(__file__).parents[NgramProposer.__module__.count(".")])
            environment = {TABLE_VARIABLE: str(Path(where).resolve()), "PYTHONPATH": root}
        elif where is not None:
            draft["model"] = str(_exported(config, setup, method.source, where, folder))
    place, _ = as_safetensors(setup.target.source, setup.target.revision)
    job = {
        "engine": config.engine, "target": place, "revision": setup.target.revision, "dtype": setup.floats,
        "device": setup.device.type, "context": min(longest + 64, context_length(setup, {})), "draft": draft,
        "options": config.engine_options, "work": str(folder.resolve()), "most": max(config.concurrency),
    }  # fmt: skip
    with Stage(f"starting {config.engine}"):
        return EngineProcess(python_in(config.engine_python), job, folder / f"{name}.log", environment)


def _exported(config: EvaluateConfig, setup: TargetSetup, source: str, where: str, folder: Path) -> Path:
    """The drafter in `where` as engines load it."""
    made = folder.resolve() / source
    if not (made / "config.json").exists():
        config.plugin(KINDS[source]).serve(where, setup.target, setup.dtype, made)
        setup.tokenizer.save_pretrained(made)
    return made


def as_results(blocks: Sequence[Block], rendered: Sequence[Sequence[int]]) -> list[PromptResult]:
    """Blocks of one method as results of its prompts, a repeat as one more turn of a prompt."""
    return [
        PromptResult(
            f"{position}/{block.key.repeat}", "", tuple(rendered[position]),
            {AUTOREGRESSIVE: plain, block.key.method: drafted}, AUTOREGRESSIVE, conversation=str(position),
        )
        for block in blocks
        for position, plain, drafted in zip(block.key.positions, block.plain, block.drafted, strict=True)
    ]  # fmt: skip


def _by_the_table(config: EvaluateConfig, setup: TargetSetup, method: MethodConfig, result: PromptResult) -> Generation:
    """The rounds of the engine's plain text by what `NgramProposer` drafts there: table and text alone decide."""
    where, text = config.where(KINDS[method.source]), result.generations[AUTOREGRESSIVE].tokens
    assert where is not None
    table = open_table(where, setup.target.vocabulary_digest, setup.target.vocabulary_size)
    rounds = chain_rounds(table, result.prompt, text, draft_length(method))
    return Generation(text, 0.0, 0.0, tuple(Round(said, many, len(said) - 1, many, 0.0) for many, said in rounds))


def serve_methods(
    config: EvaluateConfig,
    setup: TargetSetup,
    rendered: Sequence[Sequence[int]],
    ours: Mapping[int, PromptResult],
    out: Path,
) -> dict[str, Row]:
    """Measure the methods that the engine of `config` runs: by method, its part of the report.

    ours: the results of this runtime for the first turns of prompts, by position. Raises `UserError`.
    """
    methods, blocks = served_methods(config), measure_served(config, setup, rendered, sorted(ours), out)
    drawn, streams = config.sampling.temperature > 0, Streams(config.seed).within("served")
    texts = {position: ours[position].generations[ours[position].reference].tokens for position in ours}
    found: dict[str, Row] = {}
    for name, method in methods.items():
        rows = []
        for count in config.concurrency:
            some = [block for block in blocks if (block.key.method, block.key.concurrency) == (name, count)]
            results, places = as_results(some, rendered), [place for block in some for place in block.key.positions]
            here = [ours[place].generations[name] for place in places]
            if KINDS[method.source].served == "custom_class":  # here it drafts trees
                here = [_by_the_table(config, setup, method, result) for result in results]
            totals = {"plain": sum(block.plain_seconds for block in some),
                      "speculative": sum(block.drafted_seconds for block in some)}  # fmt: skip
            references = None if drawn else [texts[place] for place in places]
            row = served_row(
                name, draft_length(method), results, here, references, totals, streams.within(name, str(count))
            )
            rows.append({"engine": some[0].engine, "options": config.engine_options, "concurrency": count, **row})
        found[name] = {"served": rows}
    for name, arms in _judged(config, setup, rendered, blocks, {} if drawn else texts).items():
        found[name]["served_judgement"] = arms
    return found


def _judged(
    config: EvaluateConfig,
    setup: TargetSetup,
    rendered: Sequence[Sequence[int]],
    blocks: Sequence[Block],
    known: Mapping[int, Sequence[int]],
) -> dict[str, Row]:
    """By method and arm, the audit of the engine's texts that are not the `known` ones; nothing where all are."""
    from inference.audit.answers import ServedAnswer  # the audit: only if an engine was measured
    from inference.audit.audit import judged, read

    model, audited = None, dict[str, Row]()
    sampling = replace(config.sampling, repetition_penalty=setup.inherited.taken.get("repetition_penalty"))
    for name in dict.fromkeys(block.key.method for block in blocks):
        for arm in ("plain", "drafted"):
            said = {
                (position, generation.tokens): ServedAnswer(
                    prompt_ids=list(rendered[position]), output_ids=list(generation.tokens), **vars(sampling)
                )
                for block in blocks
                for position, generation in zip(block.key.positions, getattr(block, arm), strict=True)
                if block.key.method == name and generation.tokens != known.get(position)
            }
            if said:
                model = model or load_plain(setup.target, setup.dtype, setup.device)
                answers = dict(enumerate(said.values()))
                finding = judged(read(model, answers, Streams(config.seed), simulate=False), answers, LEVEL)
                faults = {"texts": len(said), "verdict": finding.verdict, "faults": list(finding.faults)}
                audited.setdefault(name, {})[arm] = faults
    return audited

"""Arms on prompts in turn. The result of every prompt is saved, so that the same command resumes a measurement.

Does in one process what evaluate-checkpoint does for its methods, and the same for peers.
"""

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from transformers import PreTrainedModel

from outrider.base.errors import UserError, require
from outrider.base.files import require_writable
from outrider.base.run_dirs import only_run
from outrider.base.settings import construct
from outrider.base.streams import Streams
from outrider.commands import build, explain, register
from outrider.commands.options import compose_defaults
from outrider.data_prep.text.prompts import Prompt, read_prompts
from outrider.inference.engines.cpu.recorded import recorded
from outrider.inference.loading.targets import (
    Models,
    TargetSetup,
    context_length,
    find_setup,
    load_drafters,
    load_models,
    run_settings,
)
from outrider.inference.measure.arms import measure, measure_deviations
from outrider.inference.measure.bench import (
    WARM_UP_TOKENS,
    Bench,
    Prepared,
    longest_text,
    make_bench,
    prepare_methods,
    render,
    require_fits,
)
from outrider.inference.measure.results import (
    Arm,
    Measured,
    PromptResult,
    append_result,
    begin_run,
    next_number,
    open_run,
    read_results,
)
from outrider.inference.measure.threads import use_threads
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig

# Options of evaluate-checkpoint that the benchmarks set themselves or do not use.
SAID_OTHERWISE = ("prompts", "prompt_text", "prompt_chars", "num_prompts", "minutes", "transcripts", "tokenizer",
                  "out_dir", "resume", "debug", "plan", "card", "wandb", "show_prompts")  # fmt: skip
ArmsFor = Callable[[int], Mapping[str, Arm]]  # new tokens of these
MakePeers = Callable[[TargetSetup, Models, int], ArmsFor]  # from the models, for texts of so many tokens at most


@dataclass(frozen=True)
class Contest:
    """The measurements so far.

    methods: as they ran, by name. results: of the finished prompts. asked: the number of all prompts.
    threads: the number of prompts by the number of CPU threads.
    """

    setup: TargetSetup
    methods: Mapping[str, MethodConfig]
    results: Sequence[PromptResult]
    asked: int
    threads: Mapping[int, int]


@dataclass(frozen=True)
class Field:
    """All arms by name; which of them are ours, and what was prepared for these; the target as transformers runs it."""

    arms: Mapping[str, Arm]
    bench: Bench
    prepared: Prepared
    plain: PreTrainedModel


def add_options(parser: argparse.ArgumentParser, work: str) -> None:
    """Add the options for prompts and duration. work: the folder for the results of prompts."""
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="options of evaluate-checkpoint")
    which = "a category and its prompts, in any layout that evaluate-checkpoint reads; several times"
    parser.add_argument("--prompts", action="append", metavar="NAME=FILE", required=True, help=which)
    parser.add_argument("--per-category", type=int, default=16, help="prompts of each category, evenly spread")
    parser.add_argument("--minutes", type=float, help="begin no prompt after so many; the same command goes on")
    parser.add_argument("--work", type=Path, default=Path(work), help="where the results of every prompt are kept")


def evaluation(options: Sequence[str]) -> EvaluateConfig:
    """The settings of evaluate-checkpoint with `options`. Raises `UserError` for options that have no effect here."""
    for option in options:
        key = option.partition("=")[0].lstrip("+~")
        if key.partition(".")[0] in SAID_OTHERWISE:
            raise UserError(f"{option}: not an option here; see --help for prompts and places")
    register("evaluate_checkpoint", EvaluateConfig)
    try:
        config = build(EvaluateConfig, compose_defaults("evaluate_checkpoint", list(options)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from None
    require(config.sampling.temperature == 0, "sampling.temperature", config.sampling.temperature, "0: texts compare")
    require(config.target != "replay", "target", config.target, "a model: a recording has no speed")
    return config


def read_categories(named: Sequence[str], per_category: int) -> list[Prompt]:
    """`per_category` prompts of every NAME=FILE; of a conversation, the first turn. The categories take turns, so that
    a measurement that is stopped has the same number of each."""
    require(per_category >= 1, "per-category", per_category, "at least 1")
    groups = []
    for one in named:
        name, _, file = one.partition("=")
        require(bool(name and file), "prompts", one, "NAME=FILE")
        found = read_prompts(file, limit=per_category)
        groups.append([replace(p, id=f"{name}/{p.id}", category=name, turns=p.turns[:1]) for p in found])
    names = [group[0].category for group in groups]
    require(len(set(names)) == len(names), "prompts", names, "another name for every file")
    return [prompt for level in itertools.zip_longest(*groups) for prompt in level if prompt is not None]


def measure_all(
    config: EvaluateConfig,
    prompts: Sequence[Prompt],
    folder: Path,
    minutes: float | None,
    *,
    peers: MakePeers,
    identity: Mapping[str, Any],
    judged: int,
) -> Contest:
    """Every method of `config`, both baselines and the peers, prompt by prompt in turn.

    folder: for the result of every prompt; prompts whose results it has are not measured again.
    minutes: no prompt begins later, except the first.
    peers: further arms, made after the models are loaded. identity: of the peers; other results are not mixed in.
    judged: the number of prompts that are judged if equal texts do not decide (see `lossless`).

    Raises `UserError` for bad input, and if `folder` holds results of other settings.
    """
    began = time.monotonic()
    setup = find_setup(config)
    ids = [render(setup, prompt, prompt.turns) for prompt in prompts]
    settings = {"evaluation": run_settings(config, setup, prompts), "peers": dict(identity)}
    with only_run(require_writable(folder), "results"):
        known = open_run(folder, settings, resume=True)
        done, number = read_results(folder), next_number(folder)
        todo = [position for position in range(len(prompts)) if position not in done]
        if todo:
            threads = use_threads(config.threads)
            field = enter(config, setup, prompts, ids, known, peers)
            if known is None:
                known = asdict(field.prepared)
                begin_run(folder, settings, known)
            for position in tqdm(todo, desc="measure", unit="prompt", disable=None):
                if minutes is not None and position != todo[0] and time.monotonic() - began > 60 * minutes:
                    break
                prompt = prompts[position]
                result = measure(
                    field.arms, ids[position], prompt_id=prompt.id, category=prompt.category, repeats=config.repeats,
                    turn=position, seed=config.seed,
                )  # fmt: skip
                if position < judged:
                    result = judge(result, field, config.seed)
                append_result(folder, number, Measured(position, 1, (result,), threads=threads))
            done = read_results(folder)
    results = [result for _, measured in sorted(done.items()) for result in measured.turns]
    threads_used = Counter(measured.threads for measured in done.values())
    return Contest(setup, construct(Prepared, known).methods, results, len(prompts), dict(threads_used))


def enter(
    config: EvaluateConfig,
    setup: TargetSetup,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    known: Any,
    peers: MakePeers,
) -> Field:
    """All arms after warm-up. ids: of the prompts. known: what an earlier run prepared (see `Prepared`), or None."""
    earlier = None if known is None else construct(Prepared, known)
    drafters = load_drafters(config, setup.target, dtype=setup.dtype, device=setup.device)
    with recorded(None if earlier is None else earlier.products):
        models = load_models(config, setup, drafters)
    context = context_length(setup, models.drafters)
    require_fits(prompts, ids, context - config.max_new_tokens)
    positions = longest_text([[each] for each in ids], config.max_new_tokens, context)
    prepared = earlier or prepare_methods(config, setup, models, ids[0], positions)
    models.runtime.prepare(positions, prepared.kernels)
    bench = make_bench(config, setup, models, prepared, ids[0], len(ids))
    others = peers(setup, models, positions)
    for arm in others(WARM_UP_TOKENS).values():
        arm(ids[0], Streams(config.seed).within("warm-up"))
    return Field({**bench.arms, **others(config.max_new_tokens)}, bench, prepared, models.plain)


def judge(result: PromptResult, field: Field, seed: int) -> PromptResult:
    """`result` with the rounding errors of our arms on the reference's text, if equal texts do not decide."""
    if field.bench.judge is None:
        return result
    streams = Streams(seed, result.prompt_id)
    return replace(result, deviations=measure_deviations(field.plain, result, field.bench.judge, streams))

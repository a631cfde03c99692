"""The plan of an evaluation: its target, prompts and drafters, all checked before weights of the target are loaded.

A kind is a kind of drafters (early_exit, eagle3, …); its entry in `KINDS` has the options and loads the code.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object

from outrider.base.errors import UserError, reason, require
from outrider.base.files import digest_of, require_writable
from outrider.base.machine import describe_machine
from outrider.base.processes import join_processes, only_run_of
from outrider.base.run_dirs import code_version
from outrider.data_prep.text.prompts import Prompt, read_prompts
from outrider.data_prep.text.settings import DataConfig
from outrider.inference.core.rounds import Clock
from outrider.inference.core.target_session import Runtime
from outrider.inference.loading.drafters import context_length, load_drafters
from outrider.inference.loading.memory_plan import evaluation_memory, evaluation_plan, explain_out_of_memory
from outrider.inference.loading.models import make_runtime
from outrider.inference.loading.target_setup import TargetSetup, find_setup, find_target
from outrider.inference.measure.prepared import longest_text, render, require_fits
from outrider.inference.measure.threads import warn_if_busy
from outrider.inference.measure.time_limit import TimeLimit
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS

Config = TypeVar("Config", bound=EvaluateConfig)


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation will measure. rendered: the ids of every prompt's first turn. drafters: by kind; they are
    dropped where an engine needs their memory. positions: the length in tokens of the longest text. identity: what the
    results depend on. processes: of the launcher. limit: of the time."""

    config: EvaluateConfig
    setup: TargetSetup
    prompts: Sequence[Prompt]
    rendered: Sequence[list[int]]
    drafters: dict[str, object]
    positions: int
    identity: Mapping[str, object]
    out_dir: Path
    processes: PartialState
    limit: TimeLimit

    @property
    def groups(self) -> int:
        """The number of groups of prompts; the prompts of a group are decoded at once."""
        return len(self.prompts) // self.config.batch


def make_plan(
    config: EvaluateConfig, prompts: Sequence[Prompt], processes: PartialState, limit: TimeLimit
) -> EvaluationPlan:
    """The plan for all methods of `config` on `prompts`. Raises `UserError` for what cannot be measured."""
    setup = find_setup(config)
    require_own_device(setup.device, processes)
    require_batches(config, setup, len(prompts))
    turn_ids = [[render(setup, prompt, [turn]) for turn in prompt.turns] for prompt in prompts]
    rendered = [first_ids for first_ids, *_ in turn_ids]
    drafters = dict(load_drafters(config, setup.target, dtype=setup.dtype, device=setup.device))
    context, new_tokens = context_length(setup.config, drafters), config.max_new_tokens
    require(new_tokens < context, "max_new_tokens", new_tokens, f"less than the models' context of {context} tokens")
    max_length = max(config.doctor_lengths, default=0)
    require(max_length <= context, "doctor_lengths", max_length, f"at most the models' context of {context} tokens")
    require_fits(prompts, rendered, context - new_tokens)
    identity = identity_of(config, setup, prompts)
    max_tokens, out_dir = longest_text(turn_ids, new_tokens, context), Path(config.out_dir)
    return EvaluationPlan(config, setup, prompts, rendered, drafters, max_tokens, identity, out_dir, processes, limit)


def require_own_device(device: torch.device, processes: PartialState) -> None:
    """Raise `UserError` if several processes would share a GPU, or run on devices of different kinds."""
    if processes.num_processes == 1:
        return
    if device != torch.device(device.type):  # a numbered one, as cuda:0
        raise UserError(f"device={device}: {processes.num_processes} processes would share it; give device=auto")
    devices = sorted(set(gather_object([describe_machine(str(device))["device"]])))
    if len(devices) > 1:
        raise UserError(f"the processes run on {' and '.join(devices)}: give them devices of one kind to measure on")


def require_batches(config: EvaluateConfig, setup: TargetSetup, n_prompts: int) -> None:
    """Raise `UserError` if groups of `config.batch` texts do not divide the prompts, or cannot be decoded at once."""
    group_size = config.batch
    require(n_prompts % group_size == 0, "batch", group_size, f"a divisor of the {n_prompts} prompts (num_prompts)")
    can_batch = group_size == 1 or make_runtime(config.runtime, setup.device).name == Runtime.name
    require(can_batch, "batch", group_size, "1 with CUDA graphs, where texts take turns, or runtime=eager")


def identity_of(config: EvaluateConfig, setup: TargetSetup, prompts: Sequence[Prompt]) -> dict[str, object]:
    """What results depend on: options, digests of inputs, device and code version. A resumed run must agree on it."""
    prompt_fields = [[p.id, p.category, p.turns, p.chat, *([p.system] if p.system else [])] for p in prompts]
    fingerprint_items = asdict(setup.target.fingerprint).items()
    drafter_identity: dict[str, object] = {}
    for kind in KINDS.values():
        drafter_identity |= kind.load_plugin().identity(config.where(kind))
    return {
        **config.decisions(),  # the options that affect results
        "target": {key: value for key, value in fingerprint_items if key not in ("target", "revision")},  # mere names
        **drafter_identity,
        "versions": {"code": code_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "end_tokens": sorted(setup.eos),
        "generation_config": setup.inherited.fields,
        "prompts": digest_of(prompt_fields)[:16],
        "dtype": f"int8 {setup.floats}" if setup.int8 else setup.floats,
        "device": f"{setup.device.type} ({describe_machine(str(setup.device))['device']})",
    }


def heldout_fraction(config: EvaluateConfig) -> float:
    """The held-out share of the prompts `python_stdlib`: the least that a drafter's training on them held out. Raises
    `UserError` for a drafter that held out none of them and is asked for them."""
    fractions = []
    is_readable = config.checkpoint is None or config.checkpoint_kind is not None
    asks_for_library = config.prompts == "python_stdlib" and not config.prompt_text and is_readable
    for kind, record in config.training_records().items() if asks_for_library else ():
        data: Any = record.data or {}
        option = f"{KINDS[kind].option}={config.paths[kind]}"
        try:
            if "python_stdlib" in {settings.get("source") for settings in (data, *data.get("mix", {}).values())}:
                fractions.append(float(data["heldout_fraction"]))
                require(0 <= fractions[-1] < 1, "training.data.heldout_fraction", fractions[-1], "0 or more, below 1")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{option}: does not say what data it was trained on ({reason(error)}); restore it"
            ) from None
        if fractions and not fractions[-1]:
            raise UserError(f"prompts=python_stdlib: {option} has learned from all of them; give a file of prompts")
    return min(fractions, default=DataConfig.heldout_fraction)


def run_on_prompts(config: Config, evaluate: Callable[[Config, Sequence[Prompt]], None]) -> None:
    """Call `evaluate` with the prompts that `config` names; with plan=true only print what every device would hold."""
    if config.plan:
        print(evaluation_plan(config, find_target(config)), flush=True)
        return
    warn_if_busy()  # other programs on the machine make timings unreliable
    source = config.prompt_text or config.prompts
    prompts = read_prompts(
        source, limit=config.num_prompts, prompt_chars=config.prompt_chars, heldout_fraction=heldout_fraction(config)
    )
    with explain_out_of_memory(lambda: evaluation_memory(config, find_target(config))):
        evaluate(config, prompts)


@contextmanager
def begin_evaluation(
    config: Config, prompts: Sequence[Prompt], clock: Clock = time.perf_counter
) -> Iterator[EvaluationPlan]:
    """Join the processes, lock `config.out_dir` and make the plan. Raises `UserError` if another run is using it."""
    time_limit = TimeLimit(config.minutes, clock(), clock=clock)
    processes = join_processes()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    out_dir = require_writable(config.out_dir)
    config.wandb.is_on()  # raises now if something it needs is missing
    with only_run_of(processes, out_dir, "results", config.resume):
        yield make_plan(config, prompts, processes, time_limit)


def end_evaluation(plan: EvaluationPlan, lossy_methods: Sequence[str]) -> None:
    """End the process with status 1 if there are `lossy_methods`, whose texts were not the target's."""
    if lossy_methods:
        if plan.processes.is_main_process:
            generations_path = f"{plan.config.out_dir}/generations.jsonl"
            print(f"error: not lossless: {', '.join(lossy_methods)}; see {generations_path}", file=sys.stderr)
        sys.exit(1)

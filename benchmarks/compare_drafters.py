"""Which kind of drafter pays: all trained for the same minutes on the same answers, and measured on the same prompts.

    python benchmarks/compare_drafters.py --target runs/demo/target --data data=python_stdlib --train-minutes 5 \
        --train --measure --training seq_len=256 fit.batch_rows=8 --small-lm drafter=tiny \
        --prompts library=python_stdlib
    python benchmarks/compare_drafters.py --target T --data data=responses data.path='R/responses-*.jsonl' \
        --train-minutes 8 --device cuda --dtype bfloat16 --train --training fit.precision=bf16 seq_len=512
    python benchmarks/compare_drafters.py … --measure --prompts chat=mt_bench.jsonl --prompts maths=gsm8k.jsonl

--train runs train/eagle3.py, train/eesd.py, train/finetune_drafter.py and data_prep/build_trigrams.py, each in a
process of its own with the options given; what is done already is kept, and what was cut goes on. The minutes are of
optimizer steps. Loading, compiling and preparing the rows come on top, and the whole wall clock is in the record too.
Counting n-grams takes no minutes of steps.

--measure continues all prompts in one process, prompt by prompt in turn, with each drafter as a chain of K tokens and
as the tree of EAGLE-2 (of an n-gram table: the K and the N likeliest nodes). So ratios of speeds are of pairs on the
same prompt, and an interval is over prompts. Then each decodes one prompt in a process of its own, for its memory.

Both with the same options, together or one after the other. KEY=VALUE are options of evaluate-checkpoint. Ends with
the table and writes the JSON.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from figures import all_figures
from interleaved import Contest, add_options, evaluation, measure_all, read_categories
from measured_command import run_measured
from record_tables import SHAPES, drafters_table
from safetensors import safe_open
from trainings import require_same

from conf import reported
from data_prep.text.prompts import Prompt
from draft_models.checkpoint import META_FILE, provenance
from draft_models.ngrams.table_files import TABLE_FILE
from draft_models.small_lm import TRAINING_FILE
from inference.drafters.registry import KINDS
from inference.evaluate.bench import JUDGED
from inference.evaluate.results import AUTOREGRESSIVE, TRANSFORMERS
from inference.evaluate.speed import speedup
from inference.evaluate.statistics import acceptance_by_position
from inference.method_settings import MethodConfig, NgramConfig, StopConfig, StructureConfig
from inference.settings import RUNTIMES, EvaluateConfig
from outrider.errors import UserError, require
from outrider.files import read_json, require_writable, write_json
from outrider.machine import describe_machine
from outrider.streams import Streams
from train.time_budget import STEPS_FILE

HERE = Path(__file__).parent
OWN = ("target", "checkpoint", "small_lm", "eagle3", "table", "drafters", "method", "methods", "device", "dtype",
       "runtime")  # fmt: skip
# A training ends with its minutes, and no step is chosen by an evaluation.
BUDGET = ("fit.epochs=null", "fit.steps=1000000", "fit.eval_every=null", "fit.save_every=null",
          "fit.wandb.mode=disabled")  # fmt: skip


@dataclass(frozen=True)
class Entrant:
    """A kind of drafter: what trains it, the file that this leaves last, and what it is told of its own."""

    label: str
    source: str
    script: str
    done: str
    told: tuple[str, ...] = ()

    @property
    def learns(self) -> bool:
        """In steps; else it counts."""
        return KINDS[self.source].shaped


ENTRANTS = {
    "eagle3": Entrant("EAGLE-3", "eagle3", "train/eagle3.py", "eagle3.json"),
    "eesd": Entrant("early exit (EESD)", "early_exit", "train/eesd.py", META_FILE),
    "small_lm": Entrant("small LM", "small_lm", "train/finetune_drafter.py", TRAINING_FILE),
    "ngrams": Entrant("n-grams", "ngrams", "data_prep/build_trigrams.py", TABLE_FILE, ("orders=[2,3,4]",)),
}


def train_all(options: argparse.Namespace) -> None:
    """Train every drafter that is not there yet."""
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {})}
    for name in options.drafters:
        entrant, folder = ENTRANTS[name], options.work / name
        if (folder / entrant.done).exists():
            continue
        told = [f"out_dir={folder}", "resume=true", *options.data, *entrant.told]
        if entrant.learns:
            told += [f"target={options.target}", f"minutes={options.train_minutes}", *BUDGET, *options.training]
        else:
            told += [f"tokenizer={options.target}"]
        told += getattr(options, name)
        script = str(HERE.parent / entrant.script)
        run_measured(options.work / f"{name}.json", script, *told, environment=environment)


def methods_of(name: str, options: argparse.Namespace) -> dict[str, MethodConfig]:
    """How a drafter decodes, by arm."""
    source, wide = ENTRANTS[name].source, options.tree_nodes
    if not ENTRANTS[name].learns:
        few = {"chain": (options.draft_tokens,) * 2, "tree": (wide, 20)}
        made = {shape: MethodConfig(source, ngrams=NgramConfig(evidence="mixed", nodes=nodes, depth=depth))
                for shape, (nodes, depth) in few.items()}  # fmt: skip
    else:
        size = {"nodes": wide, "max_depth": options.tree_depth, "width": options.tree_width}
        made = {
            "chain": MethodConfig(source, stop=StopConfig(max_draft=options.draft_tokens)),
            "tree": MethodConfig(source, StructureConfig("opt_tree", delta=0.0, temperature=0.5, **size)),
        }
    return {f"{name} {shape}": method for shape, method in made.items()}


def decoders(name: str, options: argparse.Namespace) -> EvaluateConfig:
    """What evaluate-checkpoint would be told. Raises `UserError` where the drafter is not there."""
    entrant, folder = ENTRANTS[name], options.work / name
    if not (folder / entrant.done).exists():
        raise UserError(f"{folder}: no finished drafter there; train it first, with --train")
    told = [*options.options, f"target={options.target}", f"checkpoint={folder}", f"device={options.device}",
            f"dtype={options.dtype}", f"runtime={options.runtime}"]  # fmt: skip
    config = evaluation([*told, f"method=[{KINDS[entrant.source].preset}]"])
    return replace(config, methods=methods_of(name, options))


def trained(name: str, folder: Path) -> dict[str, Any]:
    """What a drafter is and what its training took, by what it left."""
    entrant = ENTRANTS[name]
    known = read_json(folder / entrant.done, "record of a training", "train it again")
    facts = known.get("training", known)
    files = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")]
    found = {
        "parameters": sum(map(parameters, files)) or None,
        "model_bytes": sum(file.stat().st_size for file in files),
    }
    if entrant.learns:
        fit, width = facts["fit"], {**facts, **facts.get("settings", {})}["seq_len"]
        steps = read_json(folder / STEPS_FILE, "number of steps", "train it again")
        found |= {"steps": facts["steps"], "minutes": facts["steps"] * steps["seconds_per_step"] / 60}
        found |= {"tokens": facts["steps"] * fit["batch_rows"] * width}  # places in rows: padding too
    else:
        found |= {"steps": None, "minutes": None, "tokens": known["facts"]["tokens"]}
    command = read_json(folder.parent / f"{name}.json", "measurement of a command", "train the drafter again")
    return found | {"command": command}


def parameters(file: Path) -> int:
    """Of a file of weights; tables of integers are none."""
    if file.suffix != ".safetensors":
        return 0
    with safe_open(file, "pt") as opened:
        tensors = (opened.get_tensor(name) for name in opened.keys())  # noqa: SIM118  # it is no mapping
        return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())


def memory(name: str | None, prompt: Prompt, options: argparse.Namespace, max_new_tokens: int) -> dict[str, Any]:
    """What decoding one prompt takes in a process of its own, by shape; of plain decoding where no name is given."""
    placed = {"device": options.device, "dtype": options.dtype, "runtime": options.runtime}
    arms: dict[str, dict[str, Any]] = {"plain": {"source": options.target, "method": "prompt_lookup"}}
    if name is not None:
        drafter = {"source": str(options.work / name), "target": options.target}
        arms = {arm.split()[1]: {**drafter, "method": asdict(method)}
                for arm, method in methods_of(name, options).items()}  # fmt: skip
    found = {}
    for shape, arm in arms.items():
        facts = options.work / "memory" / f"{name or 'target'}_{shape}.json"
        if not facts.exists():
            require_writable(facts.parent)
            told = (json.dumps(arm | placed), prompt.turns[0], str(max_new_tokens))
            run_measured(facts, str(HERE / "decode_alone.py"), *told)
        found[shape] = read_json(facts, "measurement of a command", "remove it")
    return found


def row_of(name: str, contest: Contest, arms: Mapping[str, Any], options: argparse.Namespace, seed: int) -> Any:
    """All that is known of a drafter, JSON-able. arms: what was measured of each, by name."""
    chain, others = f"{name} chain", [other for other in options.drafters if other != name]
    streams = Streams(seed).within("pairs", name)
    return {
        "drafter": ENTRANTS[name].label,
        "trained": trained(name, options.work / name),
        "agreement_by_position": acceptance_by_position(result.generations[chain] for result in contest.results),
        **{shape: arms[f"{name} {shape}"] for shape in SHAPES},
        "over_others": {
            shape: {other: speedup(contest.results, f"{name} {shape}", f"{other} {shape}", streams) for other in others}
            for shape in SHAPES
        },
    }


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Measure all drafters, write the JSON and show the table. Raises `UserError`."""
    require(bool(options.prompts), "prompts", options.prompts, "NAME=FILE with --measure")
    configs = [decoders(name, options) for name in options.drafters]
    prompts = read_categories(options.prompts, options.per_category)
    contest = measure_all(configs, prompts, options.work / "measured", options.minutes, judged=JUDGED)
    first = configs[0]
    arms = all_figures(contest.results, first.seed)
    rows = {name: row_of(name, contest, arms, options, first.seed) for name in options.drafters}
    for name, row in rows.items():
        row["memory"] = memory(name, prompts[0], options, first.max_new_tokens)
    record = {
        "command": shlex.join(["python", "benchmarks/compare_drafters.py", *arguments]),
        "target": options.target,
        "data": options.data,
        "options": {name: getattr(options, name) for name in ("training", *ENTRANTS)},
        "train_minutes": options.train_minutes,
        "note": options.note,
        "machine": describe_machine(str(contest.subject.device)),
        "threads": contest.threads,
        "dtype": contest.subject.numbers,
        "runtime": options.runtime,
        "made_with": provenance(),
        "prompts": len(contest.results),
        "prompts_asked": contest.asked,
        "max_new_tokens": first.max_new_tokens,
        "methods": {name: asdict(method) for name, method in contest.methods.items()},
        "baselines": {name: arms[name] for name in (AUTOREGRESSIVE, TRANSFORMERS) if name in arms},
        "memory_without_a_drafter": memory(None, prompts[0], options, first.max_new_tokens)["plain"],
        "drafters": rows,
    }
    out = options.out or HERE / f"results/drafters_{Path(options.target).name}_{contest.subject.device.type}.json"
    require_writable(out.parent)
    write_json(out, record)
    print(drafters_table(rows))
    print(f"prompts={len(contest.results)} of {contest.asked} out={out}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "runs/drafters", prompts=False)
    parser.add_argument("--train", action="store_true", help="the drafters that are not there yet")
    parser.add_argument("--measure", action="store_true", help="what has been trained")
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True, help="options data=… and data.… of all four commands")
    parser.add_argument("--train-minutes", type=float, required=True, help="of training steps, for each drafter")
    parser.add_argument("--drafters", nargs="+", choices=ENTRANTS, default=[*ENTRANTS])
    parser.add_argument("--training", nargs="*", default=[], help="options of the three that train in steps")
    for name, entrant in ENTRANTS.items():
        told = f"options of {entrant.script} alone"
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="*", default=[], help=told)
    parser.add_argument("--draft-tokens", type=int, default=5, help="K of the chains")
    parser.add_argument("--tree-nodes", type=int, default=60)
    parser.add_argument("--tree-depth", type=int, default=7)
    parser.add_argument("--tree-width", type=int, default=10, help="nodes of a level that are extended")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", default="auto", help="of decoding; of training see fit.precision")
    parser.add_argument("--runtime", choices=RUNTIMES, default="auto")
    parser.add_argument("--out", type=Path, help="the JSON; default: results/drafters_TARGET_DEVICE.json beside this")
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else the machine was doing")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Train, measure, or both. Raises `UserError`."""
    require(options.train or options.measure, "phase", None, "--train, --measure or both")
    for option in options.options:
        if option.partition("=")[0].partition(".")[0].lstrip("+~") in OWN:
            raise UserError(f"{option}: not an option here; see --help for the target, its drafters and devices")
    asked = {key: getattr(options, key) for key in ("target", "data", "train_minutes", "training", *ENTRANTS)}
    require_same(options.work, asked, BUDGET)
    if options.train:
        train_all(options)
    if options.measure:
        measure(options, arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    with reported(goes_on=True):
        compare(options, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

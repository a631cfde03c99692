"""Does the judgement of losslessness in half precision separate faults from rounding? A table over seeds.

python benchmarks/bench_judgement.py --target runs/demo/target --checkpoint runs/demo/eesd --out judgement_demo.json

Every seed selects other prompts. On each prompt the runtime decodes once without a fault and once with each fault of
`planted_faults`. Every answer is then judged as evaluate-checkpoint judges it.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from planted_faults import FAULTS, REACHED, planted
from tqdm import tqdm
from transformers import PreTrainedModel

from outrider.base.files import write_json
from outrider.base.machine import describe_machine
from outrider.base.streams import Streams
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.prompts import read_prompts
from outrider.draft_models.early_exit.checkpoint import from_pretrained, provenance
from outrider.draft_models.early_exit.model import EarlyExit, exit_layers
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.rounds import Generation
from outrider.inference.drafters.shaped import Calibrated
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.loading.targets import Drafters, end_tokens, load_plain, prepare
from outrider.inference.measure.arms import Asked, make_arms, measure, measure_deviations, transformers_generate
from outrider.inference.measure.lossless import BULK, GAP, PEAK, Deviation, Judgement, judge
from outrider.inference.measure.results import Arm, Choosing
from outrider.inference.settings.method import TRANSFORMERS, MethodConfig, StructureConfig

METHODS = {
    "prompt_lookup": MethodConfig(source="prompt_lookup"),
    "tree": MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=16, max_depth=5, delta=0.0)),
}
Texts = Mapping[tuple[int, ...], Generation]  # the text of transformers' `generate`, by prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--checkpoint", help="an early-exit drafter; default: the target's last layer, untrained")
    parser.add_argument("--prompts", default="python_stdlib", help="see evaluate-checkpoint")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--num-prompts", type=int, default=12, help="of every seed")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    subject, prompts = load(options)
    rows: list[dict[str, Any]] = []
    for seed in tqdm(options.seeds, unit="seed"):
        chosen = random.Random(seed).sample(prompts, options.num_prompts)
        texts = {prompt: subject.generate(prompt) for prompt in chosen}
        for fault in (None, *options.faults):
            for arm, (found, identical) in subject.judged(texts, fault, seed).items():
                rows.append(
                    {"seed": seed, "fault": fault or "none", "arm": arm, "refused": bool(found.faults),
                     "identical": identical, "bulk": found.bulk, "bulk_at": found.bulk_at, "peak": found.peak,
                     "peak_at": found.peak_at, "ties": found.ties, "transformers_ties": found.own_ties,
                     "largest_gap": found.largest_gap}
                )  # fmt: skip
        write_json(
            options.out,
            {"options": {key: str(value) for key, value in vars(options).items()}, "machine": describe_machine("cpu"),
             "made_with": provenance(), "limits": {"bulk": BULK, "peak": PEAK, "gap": GAP}, "rows": rows},
        )  # fmt: skip
    print(table(rows))


@dataclass(frozen=True)
class Subject:
    """The target as transformers runs it and as this runtime does, and its drafters."""

    plain: PreTrainedModel
    stack: LayerStack
    drafters: Drafters
    eos: frozenset[int]
    max_new_tokens: int

    def generate(self, prompt: Sequence[int]) -> Generation:
        return transformers_generate(self.plain, prompt, TextSettings(self.max_new_tokens, self.eos))

    def judged(self, texts: Texts, fault: str | None, seed: int) -> dict[str, tuple[Judgement, int]]:
        """For each arm in which `fault` acts: the judgement, and the number of identical texts."""
        reached = REACHED[FAULTS[fault].reaches if fault else "passes"]
        deviations: dict[str, list[Deviation]] = {name: [] for name in reached}
        identical = dict.fromkeys(reached, 0)

        def arms(choosing: Choosing = lambda selector: selector) -> dict[str, Arm]:
            text = TextSettings(self.max_new_tokens, self.eos)
            return make_arms(self.stack, self.drafters, METHODS, None, text, choosing=choosing)

        def judges(choosing: Choosing) -> dict[str, Arm]:
            return {name: arm for name, arm in arms(choosing).items() if name in reached}

        with planted(fault, seed, self.stack):
            for prompt, text in texts.items():
                every = {**arms(), TRANSFORMERS: lambda *_, known=text: known}
                (result,) = measure(every, [Asked("", "", prompt)], repeats=1, turn=0)
                for name, found in measure_deviations(self.plain, [result], judges, [Streams(0)])[0].items():
                    deviations[name].append(found)
                    identical[name] += result.identical(name)
        return {name: (judge(deviations[name]), identical[name]) for name in reached}


def load(options: argparse.Namespace) -> tuple[Subject, list[tuple[int, ...]]]:
    """The models, and the prompts to choose from."""
    target, dtype = open_target(options.target), getattr(torch, options.dtype)
    if options.checkpoint:
        drafter = from_pretrained(options.checkpoint, target.config, target.fingerprint, dtype=dtype)
    else:
        exit_layer = max(1, target.config.num_hidden_layers // 3)
        few = target.layers(exit_layers(target.config, exit_layer), dtype=dtype)
        drafter = EarlyExit(few, exit_layer, own_head=True).requires_grad_(False)
    stack, drafters = target.stack(dtype=dtype), {"early_exit": Calibrated(drafter)}
    prepare(stack, drafters)
    plain = load_plain(target, dtype, torch.device("cpu"))
    prompts = [
        tuple(render_prompt(prompt.turns[:1], target.tokenizer, "auto" if prompt.chat else "none"))
        for prompt in read_prompts(options.prompts, limit=200)
    ]
    return Subject(plain, stack, drafters, end_tokens(target), options.max_new_tokens), prompts


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One row for each fault and arm: the number of seeds that were refused, and the distance of bulk and peak."""
    lines = ["| fault | arm | refused | identical | bulk | peak | gap |", "|---|---|---|---|---|---|---|"]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        for arm in dict.fromkeys(row["arm"] for row in rows if row["fault"] == fault):
            mine = [row for row in rows if row["fault"] == fault and row["arm"] == arm]
            spans = [
                f"{min(r[k] for r in mine):.2f} … {max(r[k] for r in mine):.2f}"
                for k in ("bulk", "peak", "largest_gap")
            ]
            refused, identical = sum(row["refused"] for row in mine), sum(row["identical"] for row in mine)
            lines.append(f"| {fault} | {arm} | {refused} of {len(mine)} | {identical} | {' | '.join(spans)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

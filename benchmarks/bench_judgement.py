"""Does the judgement of losslessness in half precision separate faults from rounding? A table over seeds.

python benchmarks/bench_judgement.py --target runs/demo/target --checkpoint runs/demo/eesd --out judgement_demo.json

Every seed selects other prompts. On each prompt the runtime decodes once without a fault and once with each fault of
`planted_faults`. Every answer is then judged as evaluate-checkpoint judges it.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from planted_faults import FAULTS, REACHED, planted
from tqdm import tqdm

from outrider.base.files import write_json
from outrider.base.machine import describe_machine
from outrider.base.streams import Streams
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.prompts import read_prompts
from outrider.draft_models.early_exit.checkpoint import from_pretrained, provenance
from outrider.draft_models.early_exit.model import EarlyExit, exit_layers
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.rounds import Round
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.drafters.early_exit import EarlyExitSource
from outrider.inference.drafters.ngram.lookup import PromptLookup
from outrider.inference.drafters.shaped import Calibrated, ModelDrafter
from outrider.inference.loading.targets import end_tokens, load_plain, prepare
from outrider.inference.measure.arms import transformers_generate
from outrider.inference.measure.lossless import (
    BULK,
    GAP,
    PEAK,
    Deviation,
    Forced,
    Judgement,
    Reference,
    judge,
    make_reference,
)
from outrider.inference.measure.results import AUTOREGRESSIVE
from outrider.inference.settings.method import MethodConfig, StructureConfig
from outrider.inference.shapes.factory import make_structure

ARMS = REACHED["passes"]
TREE = MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=16, max_depth=5, delta=0.0))


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

    subject = Subject(options)
    prompts = subject.prompts(options.prompts)
    rows: list[dict[str, Any]] = []
    for seed in tqdm(options.seeds, unit="seed"):
        chosen = random.Random(seed).sample(prompts, options.num_prompts)
        references = [subject.reference(prompt, options.max_new_tokens) for prompt in chosen]
        for fault in (None, *options.faults):
            for arm, (found, identical) in subject.judged(references, fault, seed).items():
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


class Subject:
    """The target as transformers runs it and as this runtime does, and a drafter."""

    def __init__(self, options: argparse.Namespace):
        target, dtype = open_target(options.target), getattr(torch, options.dtype)
        self.tokenizer = target.tokenizer
        self.eos = end_tokens(target)
        self.model = load_plain(target, dtype, torch.device("cpu"))
        self.stack = target.stack(dtype=dtype)
        if options.checkpoint:
            self.drafter = from_pretrained(options.checkpoint, target.config, target.fingerprint, dtype=dtype)
        else:
            exit_layer = max(1, target.config.num_hidden_layers // 3)
            few = target.layers(exit_layers(target.config, exit_layer), dtype=dtype)
            self.drafter = EarlyExit.from_model(few, exit_layer, own_head=True).requires_grad_(False)
        prepare(self.stack, {"early_exit": Calibrated(self.drafter)})

    def prompts(self, source: str) -> list[list[int]]:
        return [
            render_prompt(prompt.turns[:1], self.tokenizer, "auto" if prompt.chat else "none")
            for prompt in read_prompts(source, limit=200)
        ]

    def reference(self, prompt: Sequence[int], tokens: int) -> Reference:
        text = transformers_generate(self.model, prompt, max_new_tokens=tokens, eos=self.eos).tokens
        return make_reference(self.model, prompt, text)

    def decode(
        self, arm: str, prompt: Sequence[int], tokens: int, selector: TokenSelector, eos: frozenset
    ) -> Iterator[Round]:
        options: dict[str, Any] = {"max_new_tokens": tokens, "eos": eos, "selector": selector}
        if arm == AUTOREGRESSIVE:
            return autoregressive(self.stack, prompt, **options)
        if arm == "prompt_lookup":
            return speculative(self.stack, PromptLookup(), prompt, **options)
        drafter = ModelDrafter(EarlyExitSource(self.drafter), make_structure(TREE, Streams(0)))
        return speculative(self.stack, drafter, prompt, **options)

    def judged(self, references: Sequence[Reference], fault: str | None, seed: int) -> dict[str, tuple[Judgement, int]]:
        """By arm: the judgement, and how many texts were identical."""
        found: dict[str, tuple[Judgement, int]] = {}
        with planted(fault, seed, self.stack):
            for arm in REACHED[FAULTS[fault].reaches] if fault else ARMS:
                deviations: list[Deviation] = []
                identical = 0
                for reference in references:
                    tokens = len(reference.text)
                    rounds = self.decode(arm, reference.prompt, tokens, TokenSelector(), self.eos)
                    own = tuple(token for r in rounds for token in r.tokens)
                    forced = Forced(TokenSelector(), reference)
                    for _ in self.decode(arm, reference.prompt, tokens, forced, frozenset()):
                        pass
                    deviations.append(forced.deviation(own))
                    identical += own == reference.text
                found[arm] = judge(deviations), identical
        return found


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

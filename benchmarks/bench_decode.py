"""What a round of speculative decoding costs besides the models' passes, and the whole against transformers' own.

    python benchmarks/bench_decode.py [--target runs/demo/target --checkpoint runs/demo/eesd --drafter DIR]

Two measurements, of a random target (Llama, 8 layers × 1024) and, where given, of a trained one with its drafters:

- rounds: the seconds of each part of a round (see round_parts.py).
- arms: our chain and prompt lookup against transformers' assisted generation with the same target, the same small LM
  and the same number of draft tokens, prompt by prompt in turn. transformers runs its models as they are with its
  stock attention; ours are laid out for the device as evaluate-checkpoint does it. Rates leave out everything before
  the first tokens arrive, which with transformers' assisted generation come from prefill and first draft together.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from round_parts import Subject, profile, summarise
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from data_prep.conversations import render_prompt
from data_prep.prompts import read_prompts
from draft_models.checkpoint import fingerprint_target, from_pretrained
from draft_models.early_exit import EarlyExit, exit_layers
from draft_models.files import write_json
from draft_models.small_lm import load_small_lm
from draft_models.target import LayerStack, load_config, load_layers, load_tokenizer, open_target, pick_device
from inference.compare import load_plain
from inference.decode import Round, autoregressive
from inference.evaluation import (
    Arm,
    Drafters,
    Generation,
    bootstrap_median,
    make_arms,
    measure,
    prepare,
    stock_attention,
    synchronized_clock,
    with_measured_delta,
)
from inference.packing import can_pack
from inference.report import describe_machine
from inference.settings import MethodConfig, StopConfig, StructureConfig

RESULTS = Path(__file__).parent / "results" / "decode_cpu.json"
DTYPE = torch.float32
RANDOM: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
RANDOM_TEXT = 48  # tokens of the random target's own; a prompt is 1½ times that text, for prompt lookup to find
PAIRS = {
    "autoregressive": "transformers_generate",
    "chain_small_lm": "transformers_assisted",
    "prompt_lookup": "transformers_prompt_lookup",
}
MAX_NGRAM = 3


# --- what is measured --------------------------------------------------------------------------------------------


def methods_for(draft_tokens: int) -> dict[str, MethodConfig]:
    """The methods whose rounds are taken apart; chains and prompt lookup draft `draft_tokens`."""
    fixed = StopConfig(rule="fixed", max_draft=draft_tokens)
    return {
        "chain_early_exit": MethodConfig(stop=fixed),
        "chain_small_lm": MethodConfig(source="small_lm", stop=fixed),
        "opt_tree": MethodConfig(structure=StructureConfig(kind="opt_tree")),
        "k_config": MethodConfig(structure=StructureConfig(kind="k_config")),
        "token_graph": MethodConfig(structure=StructureConfig(kind="token_graph")),
        "prompt_lookup": MethodConfig(source="prompt_lookup", stop=fixed, max_ngram=MAX_NGRAM),
    }


def random_subject(folder: Path, device: torch.device, prompts: int) -> Subject:
    """A random target in which early layers decide much of the next token, so that drafts are accepted now and then.

    Its small LM is its own first layer; its early exit sits on that layer and is a copy of its last.
    """
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**RANDOM))
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(50.0)
        target.lm_head.weight.mul_(10.0)
    small = LlamaForCausalLM(LlamaConfig(**{**RANDOM, "num_hidden_layers": 1}))
    small.load_state_dict(target.state_dict(), strict=False)
    target.save_pretrained(folder / "target")
    small.save_pretrained(folder / "small")
    source, drafter = str(folder / "target"), str(folder / "small")
    drafters = Drafters(EarlyExit.from_model(load(source, device, ends=True), 1, own_head=True).requires_grad_(False),
                        LayerStack(load(drafter, device)))  # fmt: skip
    name = f"random Llama, {RANDOM['num_hidden_layers']} × {RANDOM['hidden_size']}"
    subject = make_subject(name, source, drafter, drafters, device, [])
    starts = torch.randint(RANDOM["vocab_size"], (prompts, 1), generator=torch.Generator().manual_seed(0)).tolist()
    for start in starts:
        text = [t for r in autoregressive(subject.stack, start, max_new_tokens=RANDOM_TEXT) for t in r.tokens]
        subject.prompts.append([*text, *text[: RANDOM_TEXT // 2]])
    return subject


def load(source: str, device: torch.device, *, ends: bool = False) -> PreTrainedModel:
    """The model in `source` with all its layers, or with those at its ends: the first and the last."""
    config = load_config(source)
    layers = exit_layers(config, 1) if ends else range(config.num_hidden_layers)
    return load_layers(open_target(source), config, layers, dtype=DTYPE, device=device)


def trained_subject(options: argparse.Namespace, device: torch.device) -> Subject:
    """The target, early-exit checkpoint and small LM of the command line."""
    config, files = load_config(options.target), open_target(options.target)
    tokenizer = load_tokenizer(options.target)
    fingerprint = fingerprint_target(files, config, tokenizer)
    early_exit = from_pretrained(options.checkpoint, config, fingerprint, dtype=DTYPE, device=device)
    drafters = Drafters(early_exit, load_small_lm(options.drafter, tokenizer, dtype=DTYPE, device=device))
    prompts = read_prompts(options.prompts, limit=options.num_prompts)
    rendered = [
        render_prompt([{"role": "user", "content": p.turns[0]}], tokenizer, "auto" if p.chat else "none")
        for p in prompts
    ]
    return make_subject(options.target, options.target, options.drafter, drafters, device, rendered)


def make_subject(
    name: str, target: str, drafter: str, drafters: Drafters, device: torch.device, prompts: list[list[int]]
) -> Subject:
    """Everything loaded and laid out as evaluate-checkpoint does it, and transformers' own copies beside it."""
    plain, assistant = (load_plain(source, None, DTYPE, device) for source in (target, drafter))
    stack = LayerStack(load(target, device) if can_pack(device, DTYPE) else plain)
    prepare(stack, drafters)
    return Subject(name, stack, drafters, plain, assistant, prompts)


# --- against transformers -----------------------------------------------------------------------------------------


class _Deliveries(BaseStreamer):
    """Notes the tokens that arrive, a list per pass of the target, and when."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.tokens: list[tuple[int, ...]] = []

    def put(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())
        self.tokens.append(tuple(value.flatten().tolist()))

    def end(self) -> None:
        pass


@torch.inference_mode()
def transformers_arm(
    model: PreTrainedModel, prompt: Sequence[int], *, max_new_tokens: int, assistant: PreTrainedModel | None = None,
    draft_tokens: int = 0, lookup: bool = False,
) -> Generation:  # fmt: skip
    """Greedy `generate`, plain or assisted with a constant number of draft tokens, each of them submitted."""
    ids = torch.tensor([prompt], device=model.device)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": 0}
    if lookup:
        options |= {"prompt_lookup_num_tokens": draft_tokens, "max_matching_ngram_size": MAX_NGRAM}
    settings = GenerationConfig(**options)
    model.generation_config = settings
    helped: dict[str, Any] = {}
    if assistant is not None:
        assistant.generation_config = GenerationConfig(
            num_assistant_tokens=draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        helped["assistant_model"] = assistant
    seen = _Deliveries()
    with stock_attention(model), stock_attention(assistant or model):
        started = time.perf_counter()
        model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=seen, **helped
        )
    _, *tokens = seen.tokens  # the first delivery is the prompt
    _, first, *later = seen.at
    passes = [Round(t, 0, 0, at - before) for t, at, before in zip(tokens[1:], later, [first, *later], strict=False)]
    return Generation(sum(tokens, ()), first - started, later[-1] - first, tuple(passes))


def contest_arms(subject: Subject, draft_tokens: int, max_new_tokens: int) -> dict[str, Arm]:
    """Ours and transformers', by name."""
    methods = {name: method for name, method in methods_for(draft_tokens).items() if name in PAIRS}
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    arms = make_arms(subject.stack, subject.drafters, methods, None, eos=(), seed=0, **options)

    def theirs(**help_: Any) -> Arm:
        return lambda prompt: transformers_arm(subject.plain, prompt, draft_tokens=draft_tokens, **help_, **options)

    return {
        **arms,
        "transformers_generate": theirs(),
        "transformers_assisted": theirs(assistant=subject.assistant),
        "transformers_prompt_lookup": theirs(lookup=True),
    }


def contest(subject: Subject, draft_tokens: int, max_new_tokens: int, repeats: int) -> dict[str, Any]:
    """Every arm on every prompt: tokens/s, tokens per pass, equality with `generate`, and the ratios of the pairs."""
    for warm_up in contest_arms(subject, draft_tokens, 8).values():
        warm_up(subject.prompts[0])
    arms = contest_arms(subject, draft_tokens, max_new_tokens)
    results = [
        measure(arms, prompt, prompt_id=str(turn), category="", repeats=repeats, turn=turn)
        for turn, prompt in enumerate(subject.prompts)
    ]
    table = {}
    for name in arms:
        mine = [r.generations[name] for r in results]
        table[name] = {
            "tokens_per_second": statistics.median(map(tokens_per_second, mine)),
            "first_tokens_seconds": statistics.median(g.prefill_seconds for g in mine),
            "tau": sum(len(r.tokens) for g in mine for r in g.rounds) / sum(len(g.rounds) for g in mine),
            "equal_to_generate": sum(r.identical(name) for r in results),
        }
    ratios = {}
    for ours, other in PAIRS.items():
        values = [tokens_per_second(r.generations[ours]) / tokens_per_second(r.generations[other]) for r in results]
        median, interval = bootstrap_median(values, seed=0)
        ratios[f"{ours} / {other}"] = {"median": median, "ci95": interval}
    return {"prompts": len(results), "arms": table, "ratios": ratios}


def tokens_per_second(generation: Generation) -> float:
    """Of what came after the first tokens."""
    return sum(len(r.tokens) for r in generation.rounds) / generation.decode_seconds


# --- the command --------------------------------------------------------------------------------------------------


def run(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Both measurements of one subject."""
    clock = synchronized_clock if subject.stack.device.type == "cuda" else time.perf_counter
    methods: Mapping[str, MethodConfig] = {
        name: with_measured_delta(method, subject.stack, subject.drafters, subject.prompts[0], clock)
        for name, method in methods_for(options.draft_tokens).items()
    }
    profiles = profile(subject, {"autoregressive": None, **methods}, options.max_new_tokens, clock)
    return {
        "target": subject.name,
        "dtype": str(DTYPE).removeprefix("torch."),
        "draft_tokens": options.draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "methods": {name: asdict(method) for name, method in methods.items()},
        "rounds": {name: summarise(measured) for name, measured in profiles.items()},
        "against_transformers": contest(subject, options.draft_tokens, options.max_new_tokens, options.repeats),
    }


def show(result: Mapping[str, Any]) -> None:
    """The tables on standard output."""
    names = sorted({n for r in result["rounds"].values() for n in r["median_seconds_by_part"]})
    print(f"\n{result['target']}: median ms per round")
    print(f"| method | τ | drafted | round | {' | '.join(names)} | not forward |")
    print("|---" * (len(names) + 5) + "|")
    for method, r in result["rounds"].items():
        parts = " | ".join(f"{1e3 * r['median_seconds_by_part'].get(name, 0.0):.3f}" for name in names)
        print(
            f"| {method} | {r['tau']:.2f} | {r['drafted_per_round']:.1f} | {1e3 * r['median_seconds']:.3f} | "
            f"{parts} | {100 * r['share_not_forward']:.1f} % |"
        )
    against = result["against_transformers"]
    print(f"\n| arm | tokens/s | τ | equal to generate, of {against['prompts']} |\n|---|---|---|---|")
    for arm, r in against["arms"].items():
        print(f"| {arm} | {r['tokens_per_second']:.1f} | {r['tau']:.2f} | {r['equal_to_generate']} |")
    for pair, r in against["ratios"].items():
        print(f"{pair}: {r['median']:.2f}× [{r['ci95'][0]:.2f}, {r['ci95'][1]:.2f}]")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a trained target; needs --checkpoint and --drafter")
    parser.add_argument("--checkpoint", help="an early-exit drafter for it")
    parser.add_argument("--drafter", help="a small LM for it")
    parser.add_argument("--no-random", action="store_true", help="leave the random target out")
    parser.add_argument("--draft-tokens", type=int, default=4, help="K of chains and prompt lookup")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--prompts", default="python_stdlib", help="for the trained target; see evaluate-checkpoint")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=1, help="timed passes over each prompt; their median counts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    given = [options.target, options.checkpoint, options.drafter]
    if any(given) != all(given):
        parser.error("--target, --checkpoint and --drafter go together")
    if options.no_random and not options.target:
        parser.error("--no-random leaves nothing to measure without --target")
    return options


def main() -> None:
    options = parse()
    device = pick_device(options.device)
    results = []
    if options.target:
        results.append(run(trained_subject(options, device), options))
        show(results[-1])
    if not options.no_random:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(random_subject(Path(folder), device, options.num_prompts), options))
        show(results[-1])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, {"machine": describe_machine(), "results": results})


if __name__ == "__main__":
    main()

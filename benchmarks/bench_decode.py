"""Every kind of round on a target and its drafters: tokens a second, and where the time of a round goes.

    python benchmarks/bench_decode.py

The target is a random Llama, 8 layers × 1024. evaluate-checkpoint reports the same figures for a trained target. The
methods take turns prompt by prompt. The figures are medians over prompts. "other" is the time of a round outside of
drafting, shaping the draft and the target's pass.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.base.files import write_json
from outrider.base.machine import describe_machine
from outrider.draft_models.early_exit.model import EarlyExit, exit_layers
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.open_target import open_target, pick_device
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.decode import autoregressive
from outrider.inference.core.rounds import Generation
from outrider.inference.drafters.shaped import Calibrated
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.loading.targets import Drafters, make_runtime, prepare
from outrider.inference.measure.arms import Asked, make_arms, measure
from outrider.inference.settings.evaluate import RUNTIMES
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig

RESULTS = Path(__file__).parent / "results"
RANDOM: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
RANDOM_TEXT = 48  # tokens that the random target writes; a prompt repeats half of them, which prompt lookup then finds


@dataclass(frozen=True)
class Subject:
    """A target ready to decode, its drafters and prompts of ids."""

    name: str
    stack: LayerStack
    drafters: Drafters
    prompts: Sequence[Sequence[int]]


def methods_for(draft_tokens: int) -> dict[str, MethodConfig]:
    """The methods by name. Chains and prompt lookup draft `draft_tokens` tokens."""
    fixed = StopConfig(rule="fixed", max_draft=draft_tokens)
    return {
        "chain_early_exit": MethodConfig(stop=fixed),
        "chain_small_lm": MethodConfig(source="small_lm", stop=fixed),
        "opt_tree": MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=16, delta=0.2)),
        "k_config": MethodConfig(structure=StructureConfig(kind="k_config")),
        "token_graph": MethodConfig(structure=StructureConfig(kind="token_graph")),
        "prompt_lookup": MethodConfig(source="prompt_lookup", stop=fixed, max_ngram=3),
    }


def random_subject(folder: Path, prompts: int, dtype: torch.dtype, device: torch.device) -> Subject:
    """A random target whose early layers determine much of the next token, so that some drafts are accepted.

    The small LM is the target's first layer. The early exit follows that layer and is a copy of the last one.
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
    whole, first = open_target(str(folder / "target")), open_target(str(folder / "small"))
    below = whole.layers(exit_layers(whole.config, 1), dtype=dtype, device=device)
    drafters: Drafters = {
        "early_exit": Calibrated(EarlyExit(below, 1, own_head=True).requires_grad_(False)),
        "small_lm": layer_stack(first.layers(None, dtype=dtype, device=device)),
    }
    stack = layer_stack(whole.layers(None, dtype=dtype, device=device))
    prepare(stack, drafters)
    starts = torch.randint(RANDOM["vocab_size"], (prompts, 1), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [[t for r in autoregressive(stack, one, max_new_tokens=RANDOM_TEXT) for t in r.tokens] for one in starts]
    name = f"random Llama, {RANDOM['num_hidden_layers']} × {RANDOM['hidden_size']}"
    return Subject(name, stack, drafters, [[*text, *text[: RANDOM_TEXT // 2]] for text in texts])


def run(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """Every method on one subject, in turn."""
    runtime = make_runtime(options.runtime, subject.stack.device)
    methods = methods_for(options.draft_tokens)

    def generations(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Mapping[str, Generation]]:
        arms = make_arms(subject.stack, subject.drafters, methods, None, TextSettings(new_tokens), runtime=runtime)
        results = [
            measure(arms, [Asked(str(turn), "", prompt)], repeats=1, turn=turn)[0]
            for turn, prompt in enumerate(prompts)
        ]
        return [result.generations for result in results]

    generations(subject.prompts[:1], 8)
    found = generations(subject.prompts, options.max_new_tokens)
    return {
        "target": subject.name,
        "dtype": str(subject.stack.dtype).removeprefix("torch."),
        "runtime": runtime.name,
        "prompts": len(found),
        "max_new_tokens": options.max_new_tokens,
        "methods": {name: asdict(method) for name, method in methods.items()},
        "rounds": {name: summarise([one[name] for one in found]) for name in found[0]},
    }


def summarise(found: Sequence[Generation]) -> dict[str, Any]:
    """Tokens a second and τ, and the median over prompts of the mean seconds of a round, whole and by part."""
    rounds = [r for one in found for r in one.rounds]
    parts = {}
    for part in ("seconds", "draft_seconds", "structure_seconds", "verify_seconds"):
        means = [statistics.fmean(getattr(r, part) for r in one.rounds) for one in found]
        parts[part.removesuffix("_seconds")] = statistics.median(means)
    whole = parts.pop("seconds")
    return {
        "tokens_per_second": statistics.median(sum(len(r.tokens) for r in g.rounds) / g.decode_seconds for g in found),
        "tau": sum(len(r.tokens) for r in rounds) / len(rounds),
        "drafted_per_round": statistics.fmean(r.drafted for r in rounds),
        "seconds_of_a_round": whole,
        "seconds_by_part": {**parts, "other": whole - sum(parts.values())},
    }


def show(result: Mapping[str, Any]) -> None:
    """The table on standard output."""
    names = list(next(iter(result["rounds"].values()))["seconds_by_part"])
    print(f"\n{result['target']}, {result['dtype']}, {result['runtime']}: ms per round")
    print(f"| method | tokens/s | τ | drafted | round | {' | '.join(names)} |")
    print("|---" * (len(names) + 5) + "|")
    for method, r in result["rounds"].items():
        parts = " | ".join(f"{1e3 * r['seconds_by_part'][name]:.3f}" for name in names)
        print(
            f"| {method} | {r['tokens_per_second']:.1f} | {r['tau']:.2f} | {r['drafted_per_round']:.1f} | "
            f"{1e3 * r['seconds_of_a_round']:.3f} | {parts} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-tokens", type=int, default=4, help="K of chains and prompt lookup")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on CUDA only")
    parser.add_argument("--runtime", choices=RUNTIMES, default="auto")
    parser.add_argument("--out", type=Path, help="default: results/decode_DEVICE.json")
    options = parser.parse_args()
    device = pick_device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    with tempfile.TemporaryDirectory() as folder:
        subject = random_subject(Path(folder), options.num_prompts, dtype, device)
        result = run(subject, options)
    show(result)
    out = options.out or RESULTS / f"decode_{device.type}.json"
    write_json(out, {"machine": describe_machine(str(device)), "results": [result]})


if __name__ == "__main__":
    main()

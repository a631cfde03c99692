"""A quantised GGUF file as it is stored, in Outrider and in llama.cpp, in turn in one process on the same prompts.

    python benchmarks/stored_codes.py --target MODEL.gguf --prompts code.jsonl --out stored_codes_cpu.json

llama.cpp is the package llama-cpp-python, compiled for this processor; LLAMA_CPP_LIB_PATH names another library. Each
arm continues each prompt greedily. Decoding begins after the first token. Outrider's activations are of --dtype;
llama.cpp rounds them to 8 bits. Its text is another one, and its drafts come from its own text.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import outrider
from outrider.base.files import write_json
from outrider.base.machine import describe_machine
from outrider.base.progress import counted
from outrider.inference.measure.statistics import bootstrap_median

DRAFTED = (2, 5)  # drafted tokens of llama.cpp's prompt lookup; the best counts
Stream = Callable[[list[int]], Iterator[int]]  # numbers of new tokens, as they come


def of_outrider(target: str, dtype: str, new_tokens: int, table: str | None) -> tuple[Any, dict[str, Stream]]:
    """The loaded model, and its arms."""
    model = outrider.load(target, method="prompt_lookup", dtype=dtype)
    models = {"prompt_lookup": model}
    if table is not None:
        models["ngrams"] = outrider.load(target, method="ngrams", table=table, dtype=dtype)

    def stream(decoder: Any, *, speculate: bool) -> Stream:
        def run(prompt: list[int]) -> Iterator[int]:
            for each in decoder.rounds(prompt, max_new_tokens=new_tokens, speculate=speculate):
                yield len(each.tokens)

        return run

    arms = {"outrider": stream(model, speculate=False)}
    return model, arms | {f"outrider {name}": stream(one, speculate=True) for name, one in models.items()}


def of_llama_cpp(target: str, threads: int, new_tokens: int, end: int) -> dict[str, Stream]:
    """The arms of llama.cpp."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def stream(drafted: int | None) -> Stream:
        draft = None if drafted is None else LlamaPromptLookupDecoding(num_pred_tokens=drafted)
        options = {"n_ctx": 2048, "n_batch": 512, "n_threads": threads, "n_threads_batch": threads}
        model = Llama(target, draft_model=draft, verbose=False, **options)

        def run(prompt: list[int]) -> Iterator[int]:
            model.reset()
            for number, token in enumerate(model.generate(prompt, temp=0.0), start=1):
                yield 1
                if number == new_tokens or token == end:
                    return

        return run

    return {"llama.cpp": stream(None)} | {f"llama.cpp lookup of {n}": stream(n) for n in DRAFTED}


def timed(stream: Stream, prompt: list[int]) -> dict[str, float]:
    """The seconds to the first token, the tokens after it, and their seconds."""
    began = time.perf_counter()
    tokens = stream(prompt)
    count = next(tokens)
    first = time.perf_counter()
    for more in tokens:
        count += more
    return {"prefill": first - began, "tokens": count - 1, "seconds": time.perf_counter() - first}


def speeds(requests: Sequence[Mapping[str, float]]) -> list[float]:
    return [one["tokens"] / one["seconds"] for one in requests if one["tokens"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, type=Path, help='lines of {"prompt": TEXT}')
    parser.add_argument("--dtype", default="fast")
    parser.add_argument("--table", help="of n-grams")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    model, arms = of_outrider(options.target, options.dtype, options.new_tokens, options.table)
    (end,) = model.setup.eos if len(model.setup.eos) == 1 else (model.tokenizer.eos_token_id,)
    arms |= of_llama_cpp(options.target, torch.get_num_threads(), options.new_tokens, end)
    texts = [json.loads(line)["prompt"] for line in options.prompts.read_text("utf-8").splitlines()]
    prompts = [model.ids([{"role": "user", "content": text}]) for text in texts]
    requests: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for stream in arms.values():
        timed(stream, prompts[0])  # Outrider measures its sizes
    for number, prompt in enumerate(counted(prompts, "decoding", "prompts")):
        names = [*arms][number % len(arms) :] + [*arms][: number % len(arms)]
        for name in names:
            requests[name].append(timed(arms[name], prompt))
    plain, found = speeds(requests["llama.cpp"]), {}
    for name, of_arm in requests.items():
        ratios = [one / other for one, other in zip(speeds(of_arm), plain, strict=True)]
        median, interval = bootstrap_median(ratios, np.random.default_rng(0))
        found[name] = {
            "tokens_per_second": statistics.median(speeds(of_arm)),
            "requests": of_arm,
            "over_llama_cpp": {"median": median, "ci95": interval},
        }
        print(f"{name}: {found[name]['tokens_per_second']:.1f} tokens/s, {found[name]['over_llama_cpp']}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write_json(
        options.out,
        {
            "machine": describe_machine(),
            "dtype": options.dtype,
            "prompts": len(prompts),
            "prompt_tokens": [*map(len, prompts)],
            "new_tokens": options.new_tokens,
            "file": Path(options.target).name,
            "peak_bytes_of_both": peak,
            "arms": found,
        },
    )


if __name__ == "__main__":
    main()

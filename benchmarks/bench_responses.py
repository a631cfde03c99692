"""Answering prompts in batches: this device's method compared with a growing cache, in turn on the same prompts.

    python benchmarks/bench_responses.py --target runs/smollm2/fetch --prompts runs/smollm2/prompts/train.jsonl
    python benchmarks/bench_responses.py --device cpu --batch 40 --target … --prompts …

On a GPU a step is a CUDA graph. On a CPU each prompt has its own loop (see inference/batch/batch_decoder.py).

Prompts are answered in batches of similar lengths, as data_prep/generate_responses.py does. Both paths emit the same
number of tokens, up to rounding of the logits. Writes benchmarks/results/responses_DEVICE.json.
"""

import argparse
import statistics
import time
from pathlib import Path
from unittest import mock

import torch

from outrider.base.files import write_json
from outrider.base.machine import describe_machine
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.batch import batch_state, responder
from outrider.inference.batch.batch_decoder import Generator
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.batch.tasks import uniforms
from outrider.inference.core.sampling import Sampler
from outrider.inference.loading.targets import end_tokens
from outrider.inference.settings.sampling import SamplingConfig

HERE = Path(__file__).parent
WAYS = {"cuda": ("launch by launch", "graphs"), "cpu": ("growing cache", "loops")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--batch", type=int, default=640)
    parser.add_argument("--batches", type=int, default=3, help="of each way; the first ones warm up")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--top-k-logits", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    target = open_target(given.target, None)
    asked, (slow, quick) = GenerateConfig(target=given.target, data=DataConfig()), WAYS[device.type]
    with mock.patch.object(responder, "why_not_by_layers", _no):
        models = {slow: responder.load_target(asked, target, torch.bfloat16, device)}
    models[quick] = responder.load_target(asked, target, torch.bfloat16, device)
    sampler, ends = Sampler(SamplingConfig(temperature=given.temperature)), end_tokens(target)
    texts = [prompt.turns[0] for prompt in read_prompts(given.prompts, limit=given.batch * given.batches)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids = sorted((target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                  for chat in chats), key=len)  # fmt: skip
    batches = [ids[start : start + given.batch] for start in range(0, len(ids), given.batch)]
    rates: dict[str, list[float]] = {slow: [], quick: []}
    for number, batch in enumerate(batches):
        draws = [uniforms(0, f"{number}/{row}", 0, given.new_tokens) for row in range(len(batch))]
        for way in rates:
            generator = Generator(models[way], sampler, ends, greedy_tokens=4, top_k_logits=given.top_k_logits)
            fixed = _no if way == slow else batch_state.can_be_fixed
            with mock.patch.object(batch_state, "can_be_fixed", fixed):
                started = time.perf_counter()
                answers = generator.answer(batch, draws)
            tokens, seconds = sum(len(answer.tokens) for answer in answers), time.perf_counter() - started
            rates[way].append(tokens / seconds)
            print(f"{way}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s", flush=True)
    found = {
        "machine": describe_machine(given.device),
        "made_with": provenance(),
        "target": given.target,
        "batch": given.batch,
        "prompt_tokens": [[len(batch[0]), len(batch[-1])] for batch in batches],
        "new_tokens": given.new_tokens,
        "top_k_logits": given.top_k_logits,
        "tokens_per_second": rates,
        "ratio": statistics.median(fast / slow for slow, fast in zip(*rates.values(), strict=True)),
    }
    write_json(given.out or HERE / "results" / f"responses_{device.type}.json", found)


def _no(*_: object) -> bool:
    return False


if __name__ == "__main__":
    main()

"""Answering many prompts at once on a GPU: steps as graphs against steps launch by launch, in turn on the same prompts.

    python benchmarks/bench_responses.py --target runs/smollm2/fetch --prompts runs/smollm2/prompts/train.jsonl

Prompts are answered in batches of like lengths, as data_prep/generate_responses.py does. Both ways emit the same number
of tokens but for the last bits of logits. Writes benchmarks/results/responses_cuda.json.
"""

import argparse
import statistics
import time
from pathlib import Path
from unittest import mock

import torch

from data_prep.responses import batch_state
from data_prep.responses.batch_decoder import Generator, uniforms
from data_prep.text.prompts import read_prompts
from draft_models.checkpoint import provenance
from draft_models.target.model_files import load_causal_lm
from draft_models.target.open_target import open_target
from inference.evaluate.report import describe_machine
from inference.evaluate.subject import end_tokens
from inference.sampling import Sampler
from inference.settings import SamplingConfig
from outrider.files import write_json

HERE = Path(__file__).parent
WAYS = ("launch by launch", "graphs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--batch", type=int, default=640)
    parser.add_argument("--batches", type=int, default=3, help="of each way; the first ones warm up")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "responses_cuda.json")
    given = parser.parse_args()
    target = open_target(given.target, None)
    model = load_causal_lm(given.target, None, dtype=torch.bfloat16).to(given.device).eval()
    sampler = Sampler(SamplingConfig(temperature=given.temperature))
    generator = Generator(model, sampler, end_tokens(target), greedy_tokens=4)
    texts = [prompt.turns[0] for prompt in read_prompts(given.prompts, limit=given.batch * given.batches)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids = sorted((target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                  for chat in chats), key=len)  # fmt: skip
    batches = [ids[start : start + given.batch] for start in range(0, len(ids), given.batch)]
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for number, batch in enumerate(batches):
        draws = [uniforms(0, f"{number}/{row}", 0, given.new_tokens) for row in range(len(batch))]
        for way in WAYS:
            fixed = batch_state.can_be_fixed if way == "graphs" else lambda *_: False
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
        "tokens_per_second": rates,
        "ratio": statistics.median(graph / plain for plain, graph in zip(*rates.values(), strict=True)),
    }
    write_json(given.out, found)


if __name__ == "__main__":
    main()

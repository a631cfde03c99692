"""llama.cpp as a peer: the same weights as a GGUF file, the same prompts as token ids, in a separate process.

    python benchmarks/peer_llamacpp.py runs/smollm2/fetch --llama-python /tmp/llama/bin/python --prompts mt_bench.jsonl

Greedily continues a few prompts with llama.cpp and with transformers in float32, and says which texts differ. The
record has the same arms with `bench_real.py --llama-python`. llama.cpp is no dependency of this project. Install it
in a separate environment: python -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python.
"""

import argparse
import itertools
import json
import operator
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers_arms import MAX_NGRAM, generation_of

from outrider.base.errors import UserError
from outrider.base.files import require_writable
from outrider.base.streams import Streams
from outrider.commands import reported
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.prompts import read_prompts
from outrider.draft_models.formats.gguf_write import write_gguf
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.core.rounds import Generation
from outrider.inference.loading.targets import end_tokens, load_plain
from outrider.inference.measure.arms import transformers_generate
from outrider.inference.measure.results import Arm
from outrider.inference.settings.kinds import KINDS

SERVER = Path(__file__).parent / "llamacpp_server.py"
FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def llama_version(python: str) -> str:
    """The version of llama-cpp-python in the interpreter. Raises `UserError` if it has none."""
    asking = [python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    try:
        asked = subprocess.run(asking, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"llama-python={python}: {error.strerror}; give an interpreter") from None
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"llama-python={python}: {why}; {python} -m pip install llama-cpp-python")
    return asked.stdout.strip()


class LlamaServer:
    """A process that runs llama.cpp. It computes only while an answer is awaited."""

    def __init__(self, python: str, asked: dict[str, Any]):
        self.process = subprocess.Popen([python, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.arms: list[str] = self.ask(asked)["arms"]

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to one line. Raises `UserError` if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UserError(f"llama.cpp: its process ended with status {self.process.wait()}; see what it said above")
        return json.loads(line)

    def arm(self, name: str, eos: Collection[int], max_new_tokens: int) -> Arm:
        """One of its decoding methods as an arm."""
        wanted = {"arm": name, "eos": sorted(eos), "max_new_tokens": max_new_tokens}

        def decode(prompt: Sequence[int], streams: Streams) -> Generation:
            found = self.ask({**wanted, "prompt": list(prompt)})
            return generation_of(found["passes"], found["at"], eos, max_new_tokens)

        return decode


@contextmanager
def llama_server(
    python: str,
    folder: Path,
    target: PreTrainedModel,
    small_lm: PreTrainedModel | None = None,
    tokens: Sequence[int] | None = None,
    **asked: Any,
) -> Iterator[LlamaServer]:
    """llama.cpp with the weights of `target` and of a small LM that drafts; `folder` holds them temporarily.

    tokens: the target's ids of the small LM's, if it does not have all (see `DrafterPlugin.known_tokens`).
    asked: positions, threads and draft_tokens.
    """
    model = require_writable(folder) / "target.gguf"
    draft = None if small_lm is None else folder / "small_lm.gguf"
    write_gguf(target, None, model)
    if small_lm is not None and draft is not None:
        write_gguf(small_lm, None, draft)
    asked["cache"] = FORMATS[target.dtype]
    del target, small_lm  # files hold them now
    asked |= {"model": str(model), "draft": draft and str(draft), "ids": None if tokens is None else list(tokens)}
    asked |= {"max_ngram": MAX_NGRAM}
    server = LlamaServer(python, asked)
    try:
        yield server
    finally:
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.wait()
        for path in (model, draft):
            if path is not None:
                path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a Llama")
    parser.add_argument("--llama-python", required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--small-lm", help="a Llama that drafts for it")
    parser.add_argument("--prompts", default="python_stdlib", help="see evaluate-checkpoint")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--work", type=Path, default=Path("runs/llamacpp"), help="for the GGUF file meanwhile")
    options = parser.parse_args()
    with reported():
        compare(options)


@torch.inference_mode()
def compare(options: argparse.Namespace) -> None:
    """Say for every arm and prompt whether llama.cpp's text is transformers'."""
    llama_version(options.llama_python)
    target = open_target(options.target)
    plain, eos = load_plain(target, torch.float32, torch.device("cpu")), end_tokens(target)
    small = options.small_lm and load_causal_lm(options.small_lm, role="small_lm", dtype=torch.float32)
    tokens = options.small_lm and KINDS["small_lm"].load_plugin().known_tokens(options.small_lm)
    found = read_prompts(options.prompts, limit=options.num_prompts)
    prompts = [render_prompt(p.turns[:1], target.tokenizer, "auto" if p.chat else "none") for p in found]
    counts = {"max_new_tokens": options.max_new_tokens, "eos": eos}
    asked: dict[str, Any] = {"threads": torch.get_num_threads(), "draft_tokens": 4}
    asked["positions"] = max(map(len, prompts)) + options.max_new_tokens
    with llama_server(options.llama_python, options.work, plain, small, tokens, **asked) as server:
        for asked_prompt, ids in zip(found, prompts, strict=True):
            wanted = transformers_generate(plain, ids, **counts).tokens
            for name in server.arms:
                tokens = server.arm(name, eos, options.max_new_tokens)(ids, Streams(0)).tokens
                same = sum(itertools.accumulate(map(operator.eq, tokens, wanted), operator.and_))
                said = "identical" if tokens == wanted else f"differs after {same} tokens"
                print(f"prompt={asked_prompt.id} arm={name} tokens={len(wanted)} {said}", flush=True)


if __name__ == "__main__":
    main()

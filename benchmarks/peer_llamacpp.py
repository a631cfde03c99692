"""llama.cpp as a peer: the same weights as a GGUF file, the same prompts as token ids, in a separate process.

`bench_real.py --llama-python` has its arms. llama.cpp is no dependency of this project. Install it in a separate
environment: python -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python.
"""

import json
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
from outrider.draft_models.formats.gguf_write import write_gguf
from outrider.inference.core.rounds import Generation
from outrider.inference.measure.results import Arm

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

"""What answers in `audit_servers.py`: engines and runtimes as they are, and samplers with a planted fault."""

import argparse
import copy
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

from draft_models.targets.model_files import load_causal_lm
from draft_models.targets.open_target import open_target
from inference.audit.draws import TYPICAL
from inference.core.sampling import invert
from inference.loading.targets import end_tokens, load_plain
from inference.serving.engine_process import running
from inference.settings.sampling import SamplingConfig
from outrider.api.model import load
from outrider.files import require_writable
from train.exporting import export_drafter
from train.settings.export import ExportConfig

LENGTH = {0: 64, 1: 128}  # tokens of an answer, by temperature
PORT, LLAMA = 8917, ("-c", "1024", "-t", "1", "-tb", "1", "-np", "1", "-ctk", "f32", "-ctv", "f32", "--no-webui")
Texts = list[list[int]]
Answering = Callable[[int, Texts, Sequence[int]], Texts]  # temperature, prompts, a seed for each → answers
# Logits [n, V] of target and drafter, coins [n, 3] and places [n] → tokens [n]; and of a draft, whether it is accepted.
Choose = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MENDED = """
import importlib.abc, importlib.util, sys
def expand(output, given, ends, replaced, by, MAX_NUM_TOKENS=None):
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    output[: int(ends[-1])] = given.where(given != replaced, by).repeat_interleave(counts).to(output.dtype)
class Mending(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "vllm.utils.cpu_triton_utils":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), setattr(module, "_expand_kernel_impl", expand))
            return spec
sys.meta_path.insert(0, Mending())
"""  # for Python's sitecustomize: vLLM with one function that does what its kernel for GPUs does


class Makers:
    """The target, as transformers runs it, drafters for it, and what answers with them while a context lasts.

    options: of `audit_servers.py`. folder: for exports and logs.
    """

    def __init__(self, options: argparse.Namespace):
        self.options, self.folder = options, require_writable(options.out_dir).resolve()
        self.target = open_target(options.target, by_layers=False)
        self.eos = sorted(end_tokens(self.target))
        self.model = load_plain(self.target, torch.float32, torch.device("cpu"))
        self.model.generation_config = GenerationConfig()

    def exported(self, name: str) -> str:
        """The drafter `name` of --drafters as an ordinary causal LM."""
        made, where = self.folder / name, f"{self.options.drafters}/{name}"
        if not (made / "config.json").exists():
            target = None if name == "small_lm" else self.options.target
            export_drafter(ExportConfig(checkpoint=where, target=target, out_dir=str(made)))
        return str(made)

    @functools.cached_property
    def drafter(self) -> Any:
        return load_causal_lm(self.exported("small_lm"), role="small_lm", dtype=torch.float32).eval()

    @contextmanager
    def by_engine(self, engine: str, draft: Any = None, more: Any = None, **variables: str) -> Iterator[Answering]:
        """vLLM or transformers in a process of its own."""
        python = sys.executable if engine == "transformers" else self.options.vllm
        settings = {"enforce_eager": True} if engine == "vllm" else {}
        job = {"engine": engine, "target": self.options.target, "revision": None, "dtype": "float32", "device": "cpu",
               "context": 1024, "draft": draft, "options": settings, "work": str(self.folder), "most": 16}  # fmt: skip
        variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                     "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables}  # fmt: skip
        with running(python, job, self.folder / "engine.log", variables) as process:
            (self.folder / f"{engine}.version").write_text(process.version)
            asked = {"eos": self.eos, "sampling": more or {}, "concurrency": 16}

            def answer(temperature: int, prompts: Texts, seeds: Sequence[int]) -> Texts:
                given = {"temperature": temperature, "max_new_tokens": LENGTH[temperature], "seeds": seeds}
                return [[*one.tokens] for one in process.continued(prompts, {**asked, **given}, 0)[0]]

            yield answer

    def by_vllm(self, draft: Any, *, mended: bool = True, **variables: str) -> Any:
        """mended: its Python finds `MENDED` first."""
        site = require_writable(self.folder / "mended")
        (site / "sitecustomize.py").write_text(MENDED)
        paths = [str(site)] * mended + [variables.get("PYTHONPATH", "")]
        return self.by_engine("vllm", draft, **{**variables, "PYTHONPATH": ":".join(filter(None, paths))})

    @contextmanager
    def by_llama(self, *more: str) -> Iterator[Answering]:
        """llama.cpp's server, asked by its own words."""
        url = f"http://127.0.0.1:{PORT}"
        command = [self.options.llama, "-m", self.options.gguf, "--port", f"{PORT}", *LLAMA, *more]
        with open(self.folder / "llama.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)

        def ask(path: str, body: Any = None) -> Any:
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(url + path, body and json.dumps(body).encode(), headers)) as said:
                return json.load(said)

        def answer(temperature: int, prompts: Texts, seeds: Sequence[int]) -> Texts:
            common = {"n_predict": LENGTH[temperature], "temperature": temperature, "samplers": ["temperature"],
                      "return_tokens": True}  # fmt: skip
            each = zip(prompts, seeds, strict=True)
            asked = [{**common, "prompt": prompt, "seed": seed % 2**31} for prompt, seed in each]
            return [ask("/completion", body)["tokens"] for body in asked]

        try:
            while True:
                with suppress(OSError):
                    ask("/health")
                    break
                assert process.poll() is None, f"llama-server ended: see {log.name}"
                time.sleep(1)
            (self.folder / "llama.version").write_text(f"llama.cpp {ask('/props')['build_info']}")
            yield answer
        finally:
            process.kill()
            process.wait()

    @contextmanager
    def by_outrider(self, *, speculate: bool) -> Iterator[Answering]:
        model = load(f"{self.options.drafters}/eesd", target=self.options.target, dtype="float32", device="cpu")

        def answer(temperature: int, prompts: Texts, seeds: Sequence[int]) -> Texts:
            given = {"sampling": SamplingConfig(temperature=temperature), "max_new_tokens": LENGTH[temperature]}
            each = zip(prompts, seeds, strict=True)
            rounds = [model.rounds(ids, **given, seed=seed, speculate=speculate) for ids, seed in each]
            return [[token for one in answer for token in one.tokens] for answer in rounds]

        yield answer

    @contextmanager
    def by_generate(self) -> Iterator[Answering]:
        """transformers' `generate`, in batches."""

        def answer(temperature: int, prompts: Texts, seeds: Sequence[int]) -> Texts:
            ids, mask = padded(prompts)
            drawn = {"temperature": 1.0, "top_k": 0} if temperature else {}
            settings = GenerationConfig(max_new_tokens=LENGTH[temperature], eos_token_id=self.eos, pad_token_id=0,
                                        do_sample=temperature > 0, **drawn)  # fmt: skip
            torch.manual_seed(seeds[0])
            with torch.inference_mode():
                out = self.model.generate(ids, attention_mask=mask, generation_config=settings)
            return out[:, ids.shape[1] :].tolist()

        yield answer

    @contextmanager
    def by_sampler(
        self,
        choose: Mapping[int, Choose],
        *,
        int8: bool = False,
        own: bool = False,
        read: Callable[[list[int]], list[int]] = list,
    ) -> Iterator[Answering]:
        """A sampler of this file.

        own: the target itself drafts, not the small LM. int8: weights in 8 bits. read: what it makes of a prompt.
        """
        model = rounded(self.model) if int8 else self.model

        def answer(temperature: int, prompts: Texts, seeds: Sequence[int]) -> Texts:
            prompts = [*map(read, prompts)]
            return sample(
                model, model if own else self.drafter, prompts, choose[temperature], seeds, LENGTH[temperature]
            )

        yield answer


def padded(prompts: Texts) -> tuple[Tensor, Tensor]:
    """Ids and mask, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    return ids, torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])


@torch.inference_mode()
def sample(model: Any, drafter: Any, prompts: Texts, choose: Choose, seeds: Sequence[int], length: int) -> Texts:
    """Answers of a batch, with tokens by `choose`."""
    (fed, mask), said = padded(prompts), list[Tensor]()
    caches = {each: DynamicCache() for each in (model, drafter)}  # which may be one
    chance = [torch.Generator().manual_seed(seed) for seed in seeds]
    coins = torch.stack([torch.rand(length, 3, dtype=torch.float64, generator=one) for one in chance])
    for step in range(length):
        at = (mask.cumsum(-1) - 1).clamp(min=0)[:, -fed.shape[1] :]
        given = {"attention_mask": mask, "position_ids": at, "logits_to_keep": 1}
        logits = [each(fed, past_key_values=cache, **given).logits[:, -1] for each, cache in caches.items()]
        said.append(choose(logits[0], logits[-1], coins[:, step], torch.arange(len(prompts)) * length + step))
        fed = said[-1][:, None]
        mask = torch.cat([mask, torch.ones_like(fed)], 1)
    return torch.stack(said, 1).tolist()


def rounded(model: Any) -> Any:
    """`model` with the weights of its layers in 8 bits, a scale for each row."""
    other = copy.deepcopy(model)
    for layer in (one for one in other.model.modules() if isinstance(one, nn.Linear)):
        scale = layer.weight.data.abs().amax(-1, keepdim=True) / 127
        layer.weight.data = (layer.weight.data / scale).round() * scale
    return other


def without_system_turn(ids: list[int]) -> list[int]:
    """A chat prompt of ids, of which the template's first turn is left out."""
    return ids[ids.index(ids[0], 1) :]


def bare(ids: list[int]) -> list[int]:
    """The user's words alone: between a turn's beginning, its role and a line's end, and the turn's end."""
    turn, end = without_system_turn(ids), ids[ids.index(ids[0], 1) - 2]
    return turn[3 : turn.index(end)]


def best(p: Tensor, *_: Tensor) -> Tensor:
    return p.argmax(-1)


def drawn(p: Tensor, _: Tensor, coins: Tensor, __: Tensor, temperature: float = 1.0) -> Tensor:
    return invert((p / temperature).softmax(-1), coins[:, :1])[:, 0]


def drafted(accepts: Choose, otherwise: Choose, drafts: Choose) -> Choose:
    """A draft where `accepts` says so, else a token of the target's own."""

    def choose(p: Tensor, q: Tensor, coins: Tensor, places: Tensor) -> Tensor:
        draft = drafts(q, q, coins[:, 1:], places)
        return draft.where(accepts(p, draft[:, None], coins[:, 2], places), otherwise(p, q, coins, places))

    return choose


def typical(p: Tensor, draft: Tensor, _: Tensor, __: Tensor) -> Tensor:
    p = p.softmax(-1)
    bound = (TYPICAL[1] * (-torch.special.entr(p).sum(-1)).exp()).clamp(max=TYPICAL[0])
    return p.gather(-1, draft)[:, 0] > bound


def in_top_3(p: Tensor, draft: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return (p.topk(3).indices == draft).any(-1)


def one_in_200(_: Tensor, __: Tensor, ___: Tensor, places: Tensor) -> Tensor:
    return places % 200 == 199


def by_chance(p: Tensor, draft: Tensor, coin: Tensor, _: Tensor) -> Tensor:
    return coin < p.softmax(-1).gather(-1, draft)[:, 0]


def nearly_best(p: Tensor, draft: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return p.amax(-1) - p.gather(-1, draft)[:, 0] < 2

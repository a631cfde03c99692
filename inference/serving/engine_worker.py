"""A serving engine in a process and a Python of its own: reads jobs as lines of JSON, and answers each with a line.

This file runs in the engine's environment, where Outrider need not be installed, so it imports nothing of Outrider.
`inference.serving.engine_process` starts it. The first job loads models: engine, target, revision, dtype, device,
context (most tokens of a text), most (requests at a time), work (a folder), options (of the engine), draft (None, or
method by vLLM's names, tokens of a draft, model, max_ngram). A later job has prompts, seeds, max_new_tokens, eos,
temperature, sampling (top_k and the like) and concurrency.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

Json = dict[str, Any]


class Continuation:
    """A prompt that is being continued. tokens: the ids of each step. times: when the request began and when each step
    ended, in seconds."""

    def __init__(self) -> None:
        self.tokens, self.times = list[list[int]](), [time.perf_counter()]

    def add(self, tokens: Sequence[int]) -> None:
        if len(tokens):
            self.tokens.append([int(token) for token in tokens])
            self.times.append(time.perf_counter())


class EngineRunner(Protocol):
    """An engine that has loaded a target."""

    version: str

    def run(self, job: Json) -> list[Continuation]: ...


class VLLM:
    """vLLM in this process, step by step, so that every step's tokens are seen."""

    def __init__(self, job: Json) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # `run` steps the engine in this process
        memory_options: Json = {"gpu_memory_utilization": 0.45}  # the other arm's process takes as much
        if job["device"] == "cpu":
            memory_options = {}
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        import vllm

        options = {"max_num_seqs": job["most"], "enable_prefix_caching": False, **memory_options, **job["options"]}
        draft, overrides = job["draft"], options.pop("speculative_config", {})
        if draft is not None:
            ngram_options = {"prompt_lookup_max": draft["max_ngram"], "prompt_lookup_min": 1}
            drafter_options: Json = ngram_options if draft["method"] == "ngram" else {"model": draft["model"]}
            config_file = Path(drafter_options.get("model", "")) / "config.json"
            if config_file.is_file() and "pard_token" in json.loads(config_file.read_text("utf-8")):
                drafter_options["parallel_drafting"] = True  # a PARD drafter drafts all tokens in one pass
            spec_config = {"method": draft["method"], "num_speculative_tokens": draft["tokens"], **drafter_options}
            options["speculative_config"] = {**spec_config, **overrides}
        self.llm = vllm.LLM(
            model=job["target"], revision=job["revision"], dtype=job["dtype"], max_model_len=job["context"], seed=0,
            **options,
        )  # fmt: skip
        self.version = vllm.__version__

    def run(self, job: Json) -> list[Continuation]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, queue = self.llm.llm_engine, list(enumerate(zip(job["prompts"], job["seeds"], strict=True)))
        running, continuations = dict[str, Continuation](), dict[int, Continuation]()
        while queue or running:
            while queue and len(running) < job["concurrency"]:
                index, (prompt, seed) = queue.pop(0)
                params = SamplingParams(
                    max_tokens=job["max_new_tokens"], ignore_eos=True, stop_token_ids=job["eos"], seed=seed,
                    detokenize=False, output_kind=RequestOutputKind.DELTA, temperature=job["temperature"],
                    **job["sampling"],
                )  # fmt: skip
                running[f"{index}"] = continuations[index] = Continuation()
                engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params)
            for output in engine.step():
                running[output.request_id].add(output.outputs[0].token_ids)
                if output.finished:
                    del running[output.request_id]
        return [continuations[index] for index in sorted(continuations)]


class OpenVINO:
    """OpenVINO GenAI; one request at a time."""

    def __init__(self, job: Json) -> None:
        import openvino_genai as genai

        draft, precision = job["draft"], {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(job["dtype"])
        # Without hints the engine chooses its precision.
        hints = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision} if precision else {}
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, job["context"]
        options = {"scheduler_config": scheduler, **hints, **job["options"]}
        self.settings: Json = {} if draft is None else {"num_assistant_tokens": draft["tokens"]}
        if draft is not None and draft["method"] == "ngram":
            options["prompt_lookup"] = True
            self.settings["max_ngram_size"] = draft["max_ngram"]
        elif draft is not None:
            drafter_dir = self.as_ir(draft["model"], "drafter", None, job)
            options["draft_model"] = genai.draft_model(drafter_dir, "CPU", **hints)
        self.pipe = genai.LLMPipeline(self.as_ir(job["target"], "target", job["revision"], job), "CPU", **options)
        self.version = genai.__version__

    @staticmethod
    def as_ir(model: str, role: str, revision: str | None, job: Json) -> str:
        """The directory of `model` as OpenVINO reads it, converted in `job["work"]` by optimum unless it is one."""
        if Path(model, "openvino_model.xml").exists():
            return model
        folder = Path(job["work"], f"{role}-{Path(model).name}-{job['dtype']}-ir")
        if not folder.exists():
            partial_dir = folder.with_suffix(".part")
            subprocess.run(ir_command(sys.executable, model, str(partial_dir), job["dtype"], revision), check=True)
            partial_dir.rename(folder)
        return str(folder)

    def run(self, job: Json) -> list[Continuation]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        continuations: list[Continuation] = []

        class Steps(genai.StreamerBase):
            def write(self, tokens: int | list[int]) -> object:
                continuations[-1].add(tokens if isinstance(tokens, list) else [tokens])
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        for prompt, seed in zip(job["prompts"], job["seeds"], strict=True):
            settings = genai.GenerationConfig(
                max_new_tokens=job["max_new_tokens"], ignore_eos=not job["eos"], stop_token_ids=set(job["eos"]),
                include_stop_str_in_output=True,
                do_sample=job["temperature"] > 0, temperature=job["temperature"] or 1.0, rng_seed=seed,
                **self.settings, **job["sampling"],
            )  # fmt: skip
            continuations.append(Continuation())
            result = self.pipe.generate(ov.Tensor(np.array([prompt], np.int64)), settings, Steps())
            streamed_count = sum(map(len, continuations[-1].tokens))
            continuations[-1].add([*result.tokens[0]][streamed_count:])  # an end token is not streamed
        return continuations


def ir_command(python_path: str, model: str, out_dir: str, dtype: str, revision: str | None = None) -> list[str]:
    """The command by which optimum, in the environment of `python_path`, writes `model` to `out_dir` for OpenVINO."""
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32" if dtype == "float32" else "fp16"]
    options += ["--revision", revision] if revision else []
    return [str(Path(python_path).with_name("optimum-cli")), "export", "openvino", "--model", model, *options, out_dir]


class Transformers:
    """transformers' `generate`, its assisted generation included; one request at a time."""

    def __init__(self, job: Json) -> None:
        import transformers

        options = {"dtype": job["dtype"], "device_map": job["device"], "trust_remote_code": False, **job["options"]}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model: Any = load(job["target"], revision=job["revision"], **options)
        self.model.generation_config = transformers.GenerationConfig()  # `generate` fills what is not given from it
        self.settings: Json = {}
        draft = job["draft"]
        if draft is not None and draft["method"] == "ngram":
            self.settings = {"prompt_lookup_num_tokens": draft["tokens"], "max_matching_ngram_size": draft["max_ngram"]}
        elif draft is not None:
            drafter = load(draft["model"], **options)
            drafter.generation_config = transformers.GenerationConfig(
                num_assistant_tokens=draft["tokens"], num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,  # no draft ends early
            )  # fmt: skip
            self.settings = {"assistant_model": drafter}
        self.version = transformers.__version__

    def run(self, job: Json) -> list[Continuation]:
        import torch
        import transformers

        requests: list[Continuation] = []
        settings = transformers.GenerationConfig(
            max_new_tokens=job["max_new_tokens"], eos_token_id=job["eos"] or None, pad_token_id=0,
            do_sample=job["temperature"] > 0, temperature=job["temperature"] or 1.0,
            **{"top_k": 0, **job["sampling"]},  # its own default is 50
        )  # fmt: skip
        for prompt, seed in zip(job["prompts"], job["seeds"], strict=True):
            torch.manual_seed(seed)
            requests.append(continuation := Continuation())
            ids = torch.tensor([prompt], device=self.model.device)
            streamer = SimpleNamespace(put=lambda ids: requests[-1].add(ids.reshape(-1).tolist()), end=lambda: None)
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer,
                **self.settings,
            )  # fmt: skip
            del continuation.tokens[0], continuation.times[0]  # of the prompt, which `put` gets before the first pass
        return requests


ENGINES: dict[str, Callable[[Json], EngineRunner]] = {"vllm": VLLM, "openvino": OpenVINO, "transformers": Transformers}


def main(engine_makers: Mapping[str, Callable[[Json], EngineRunner]]) -> None:
    """Answer the jobs on stdin, the first of which loads one of `engine_makers`, until stdin ends."""
    out_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the engine prints goes to the log
    job = json.loads(sys.stdin.readline())
    engine = engine_makers[job["engine"]](job)
    print(json.dumps({"version": f"{job['engine']} {engine.version}"}), file=out_stream, flush=True)
    for line in sys.stdin:
        job, started = json.loads(line), time.perf_counter()
        outputs = engine.run(job)
        seconds = time.perf_counter() - started
        print(json.dumps({"requests": [vars(r) for r in outputs], "seconds": seconds}), file=out_stream, flush=True)


if __name__ == "__main__":
    main(ENGINES)

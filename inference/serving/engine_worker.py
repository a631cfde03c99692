"""A serving engine in a process and a Python of its own: reads jobs as lines of JSON, and answers each with a line.

This file runs in the engine's environment, where Outrider need not be installed, so it imports nothing of it.
`inference.serving.engine_process` starts it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Json = dict[str, Any]
Step = Callable[[Sequence[int]], object]


class Request:
    """A prompt that is being continued. tokens: those of every step; times: when the request began and each step's."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.times = prompt, [time.perf_counter()]
        self.tokens: list[list[int]] = []

    def add(self, tokens: Sequence[int]) -> None:
        if len(tokens):
            self.tokens.append([int(token) for token in tokens])
            self.times.append(time.perf_counter())


class VLLM:
    """vLLM in this process, step by step, so that every step's tokens are seen."""

    def __init__(self, job: Json) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if job["device"] == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        from vllm import LLM

        shared = {} if job["device"] == "cpu" else {"gpu_memory_utilization": 0.45}  # with the other arm's process
        draft, options = job["draft"], {**shared, "max_num_seqs": job["most"], **job["options"]}
        if draft is not None:
            options["speculative_config"] = {**self.speculative(draft), **options.get("speculative_config", {})}
        self.llm = LLM(
            model=job["target"], revision=job["revision"], dtype=job["dtype"], max_model_len=job["context"], seed=0,
            **options,
        )  # fmt: skip
        self.version = "vllm " + version("vllm" if job["device"] != "cpu" else "vllm-cpu")

    @staticmethod
    def speculative(draft: Json) -> Json:
        count = {"num_speculative_tokens": draft["tokens"]}
        if draft["method"] == "ngram":
            return {"method": "ngram", "prompt_lookup_max": draft["max_ngram"], "prompt_lookup_min": 1, **count}
        return {"method": draft["method"], "model": draft["model"], **count}

    def run(self, asked: Json) -> list[Request]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=asked["max_new_tokens"], ignore_eos=True, stop_token_ids=asked["eos"], seed=asked["seed"],
            detokenize=False, output_kind=RequestOutputKind.DELTA, **asked["sampling"],
        )  # fmt: skip
        engine, waiting = self.llm.llm_engine, list(enumerate(asked["prompts"]))
        running, done = dict[str, Request](), dict[int, Request]()
        while waiting or running:
            while waiting and len(running) < asked["concurrency"]:
                number, prompt = waiting.pop(0)
                running[f"{number}"] = done[number] = Request(prompt)
                engine.add_request(f"{number}", {"prompt_token_ids": prompt}, params)
            for output in engine.step():
                running[output.request_id].add(output.outputs[0].token_ids)
                if output.finished:
                    del running[output.request_id]
        return [done[number] for number in sorted(done)]


class OpenVINO:
    """OpenVINO GenAI; one request at a time."""

    def __init__(self, job: Json) -> None:
        import openvino_genai as genai

        draft, options = job["draft"], dict(job["options"])
        exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"} if job["dtype"] == "float32" else {}
        options = {**exact, **options}
        target = self.as_ir(job["target"], job)
        self.settings: Json = {}
        if draft is not None and draft["method"] == "ngram":
            options["prompt_lookup"] = True
            self.settings = {"num_assistant_tokens": draft["tokens"], "max_ngram_size": draft["max_ngram"]}
        elif draft is not None:
            options["draft_model"] = genai.draft_model(self.as_ir(draft["model"], job), "CPU", **exact)
            self.settings = {"num_assistant_tokens": draft["tokens"]}
        self.pipe = genai.LLMPipeline(target, "CPU", **options)
        self.version = "openvino-genai " + version("openvino-genai")

    @staticmethod
    def as_ir(model: str, job: Json) -> str:
        """The directory of `model` as OpenVINO reads it, converted in `job["work"]` by optimum unless it is one."""
        if Path(model, "openvino_model.xml").exists():
            return model
        made = Path(job["work"], f"{Path(model).name}-{job['dtype']}-ir")
        if not made.exists():
            part, weights = made.with_suffix(".part"), "fp32" if job["dtype"] == "float32" else "fp16"
            options = ["--task", "text-generation-with-past", "--weight-format", weights]
            tool = Path(sys.executable).with_name("optimum-cli")
            subprocess.run([tool, "export", "openvino", "--model", model, *options, part], check=True)
            part.rename(made)
        return str(made)

    def run(self, asked: Json) -> list[Request]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        done: list[Request] = []

        class Steps(genai.StreamerBase):
            def write(self, tokens: int | list[int]) -> object:
                done[-1].add(tokens if isinstance(tokens, list) else [tokens])
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        sampling = asked["sampling"]
        settings = genai.GenerationConfig(
            max_new_tokens=asked["max_new_tokens"], do_sample=sampling["temperature"] > 0, rng_seed=asked["seed"],
            ignore_eos=not asked["eos"], stop_token_ids=set(asked["eos"]), include_stop_str_in_output=True,
            **self.settings, **(sampling if sampling["temperature"] > 0 else {}),
        )  # fmt: skip
        for prompt in asked["prompts"]:
            done.append(Request(prompt))
            result = self.pipe.generate(ov.Tensor(np.array([prompt], np.int64)), settings, Steps())
            told = [token for step in done[-1].tokens for token in step]
            done[-1].add([*result.tokens[0]][len(told) :])  # an end token is not streamed
        return done


class Transformers:
    """transformers' `generate`, its assisted generation included; one request at a time."""

    def __init__(self, job: Json) -> None:
        import torch
        import transformers

        kept = {"dtype": getattr(torch, job["dtype"]), "device_map": job["device"], **job["options"]}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model: Any = load(job["target"], revision=job["revision"], trust_remote_code=False, **kept)
        self.settings: Json = {}
        draft = job["draft"]
        if draft is not None and draft["method"] == "ngram":
            self.settings = {"prompt_lookup_num_tokens": draft["tokens"], "max_matching_ngram_size": draft["max_ngram"]}
        elif draft is not None:
            drafter = load(draft["model"], trust_remote_code=False, **kept)
            drafter.generation_config.update(
                num_assistant_tokens=draft["tokens"], num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )  # fmt: skip
            self.settings = {"assistant_model": drafter}
        self.version = "transformers " + version("transformers")

    def run(self, asked: Json) -> list[Request]:
        import torch
        import transformers

        done: list[Request] = []
        sampling = asked["sampling"]
        drawn = sampling["temperature"] > 0
        settings = transformers.GenerationConfig(
            max_new_tokens=asked["max_new_tokens"], do_sample=drawn, eos_token_id=asked["eos"] or None, pad_token_id=0,
            **(sampling if drawn else {"repetition_penalty": sampling["repetition_penalty"]}),
        )  # fmt: skip
        for prompt in asked["prompts"]:
            done.append(Request(prompt))
            steps = iter([lambda _: None])  # the first call passes the prompt

            def put(tokens: torch.Tensor, steps: Iterator[Step] = steps) -> None:
                next(steps, done[-1].add)(tokens.reshape(-1).tolist())

            torch.manual_seed(asked["seed"])
            ids = torch.tensor([prompt], device=self.model.device)
            streamer = SimpleNamespace(put=put, end=lambda: None)
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer,
                **self.settings,
            )  # fmt: skip
        return done


ENGINES: dict[str, type[VLLM | OpenVINO | Transformers]] = {
    "vllm": VLLM,
    "openvino": OpenVINO,
    "transformers": Transformers,
}


def main() -> None:
    """Answer the jobs on stdin, the first of which loads the engine, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log
    started = time.perf_counter()
    job = json.loads(sys.stdin.readline())
    engine = ENGINES[job["engine"]](job)
    print(json.dumps({"version": engine.version, "seconds": time.perf_counter() - started}), file=answers, flush=True)
    for line in sys.stdin:
        asked, started = json.loads(line), time.perf_counter()
        done = engine.run(asked)
        seconds = time.perf_counter() - started
        requests = [{"tokens": one.tokens, "times": one.times} for one in done]
        print(json.dumps({"requests": requests, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()

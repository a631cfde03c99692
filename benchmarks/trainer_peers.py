"""What bench_trainers.py runs in a peer's environment, on the CPU: one training by TRL or speculators.

    PYTHON trainer_peers.py JOB.json

The job says the trainer, its learning rate and its limit, in seconds or, for a trial, in steps. The first WARM steps
are not counted: no time, no token, no part of the schedule. The rate falls linearly with the time, as Outrider's does.
"""

import json
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

WARM = 3
RISE = 0.03  # share of the time in which the learning rate rises
Json = dict[str, Any]


class OverError(Exception):
    """The time is over, in a loop that knows no other end; of the model."""


class Clock:
    """What a training has had of its limit. curve: (seconds, loss) on the way. tokens: supervised ones."""

    def __init__(self, limit: Json) -> None:
        self.limit, self.steps, self.tokens, self.began, self.seconds = limit, 0, 0, time.perf_counter(), 0.0
        self.curve: list[tuple[float, float]] = []

    @property
    def share(self) -> float:
        """Of the limit."""
        done = {"seconds": time.perf_counter() - self.began, "steps": self.steps - WARM}
        return 0.0 if self.steps < WARM else max(float(done[key] / most) for key, most in self.limit.items())

    def scale(self, *_: object) -> float:
        """Of the learning rate."""
        return min(1.0, 0.1 + self.share / RISE, max(0.0, 1 - self.share))

    def step(self) -> bool:
        """Count a step. Whether it was the last."""
        self.steps += 1
        if self.steps == WARM:
            self.began, self.tokens = time.perf_counter(), 0
        self.seconds = time.perf_counter() - self.began
        return self.share >= 1

    def note(self, loss: torch.Tensor, supervised: torch.Tensor) -> None:
        """Add a batch: its loss, and bool or 0 and 1 for its tokens."""
        self.tokens += int(supervised.sum())
        if self.steps >= WARM:
            self.curve.append((time.perf_counter() - self.began, float(loss)))


def by_trl(job: Json, clock: Clock) -> None:
    """TRL's SFTTrainer: a new Llama of the job's shape, saved to its folder."""
    import transformers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            control.should_training_stop |= clock.step()

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["target"])
    target = transformers.AutoConfig.from_pretrained(job["target"])
    ends = {key: getattr(target, key) for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**job["shape"], **ends))
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, clock.scale)
    arguments = SFTConfig(
        output_dir=job["out"], per_device_train_batch_size=job["batch"], use_cpu=True, bf16=True, max_steps=10**6,
        logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True, max_length=job["seq_len"],
        gradient_checkpointing=False, completion_only_loss=True,  # its default saves memory
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=arguments, callbacks=[Watch()], optimizers=(optimizer, schedule), processing_class=tokenizer,
        train_dataset=Dataset.from_json(job["documents"]).select_columns(["input_ids", "completion_mask"]),
    )  # fmt: skip
    loss = trainer.compute_loss

    def noted(model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        found = loss(model, inputs, *given, **named)
        clock.note(found, inputs["labels"] != -100)
        return found

    vars(trainer)["compute_loss"] = noted
    trainer.train()
    model.save_pretrained(job["out"])
    tokenizer.save_pretrained(job["out"])


def cache_states(job: Json, folder: Path) -> float:
    """Write the job's documents, and the target's states as speculators reads them, unless they are there.

    A file has [tokens, 4, width]: after the layers 2, n / 2 and n - 3, and what the final norm reads. Returns the
    seconds that it took.
    """
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    if (kept := folder / "seconds.json").exists():
        return float(json.loads(kept.read_text()))
    (folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    began, often, last = time.perf_counter(), Counter[int](), list[Any]()
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.bfloat16).eval()
    model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    documents = [*map(json.loads, Path(job["documents"]).read_text().splitlines())]
    for place, one in enumerate(documents):
        ids = torch.tensor(one["input_ids"])
        with torch.inference_mode():
            states = model.model(ids[None], output_hidden_states=True).hidden_states
        layers = [*(states[layer] for layer in (2, len(states) // 2, len(states) - 4)), last.pop()]
        file = folder / "hidden_states" / f"hs_{place}.safetensors"
        save_file({"hidden_states": torch.stack([one[0] for one in layers], 1), "token_ids": ids}, file)
        often.update(token for token in one["labels"] if token >= 0)
    rows = [{"input_ids": one["input_ids"], "loss_mask": [*map(bool, one["completion_mask"])],
             "seq_len": len(one["input_ids"])} for one in documents]  # fmt: skip
    Dataset.from_list(rows).with_format("torch").save_to_disk(str(folder))
    torch.save(dict(often), folder / "token_freq.pt")
    kept.write_text(json.dumps(seconds := time.perf_counter() - began))
    return seconds


def by_speculators(job: Json, clock: Clock) -> None:
    """`speculators train` of an EAGLE-3 head. Its Trainer moves all to an accelerator: here that is the CPU."""
    for name, answer in (("synchronize", None), ("memory_allocated", 0), ("set_device_index", None)):
        setattr(torch.accelerator, name, lambda *_, answer=answer: answer)
    from speculators.__main__ import app
    from speculators.train import trainer

    trainer.get_local_rank = lambda: torch.device("cpu")
    begin = trainer.Trainer.setup_model

    def note(_: Any, __: Any, given: Json, found: Any) -> None:
        clock.note(found[1], given["loss_mask"])

    def setup_model(self: Any) -> None:
        self.device_type = "cpu"  # of its autocast
        begin(self)
        self.model.register_forward_hook(note, with_kwargs=True)

    def schedule(self: Any) -> None:
        over = clock.step()
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group.setdefault("given_lr", group["lr"]) * clock.scale()
        if over:
            raise OverError(self.model)

    trainer.Trainer.setup_model, trainer.Trainer._schedulers_step = setup_model, schedule
    said: Json = {
        "speculator-type": "eagle3", "verifier-name-or-path": job["target"], "data-path": job["states"],
        "total-seq-len": job["batch_tokens"], "on-missing": "raise", "hidden-states-dtype": "bfloat16",
        "num-workers": 0, "draft-vocab-size": job["draft_vocabulary"], "draft-attn-impl": "sdpa",
        "loss-implementation": "eager", "log-freq": 100, "train-data-ratio": 0.99, "epochs": 9999, "lr": job["lr"],
        "ttt-steps": job["steps"], "scheduler-type": "none", "checkpoint-freq": 9999, "save-path": job["out"] + "/all",
    }  # fmt: skip
    sys.argv = ["speculators", "train", *(f"{word}" for name, value in said.items() for word in (f"--{name}", value))]
    try:
        app()
    except OverError as over:
        over.args[0].save_pretrained(job["out"])


def main(job: Json) -> None:
    clock, cached = Clock(job["limit"]), 0.0
    if job["trainer"] == "speculators_eagle3":
        cached = cache_states(job, Path(job["states"]))
        by_speculators(job, clock)
    else:
        by_trl(job, clock)
    found = {"seconds": clock.seconds, "steps": clock.steps - WARM, "supervised": clock.tokens, "curve": clock.curve}
    found |= {"cached_seconds": cached, "versions": {name: version(name) for name in job["packages"]}}
    (Path(job["out"]) / "trained.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

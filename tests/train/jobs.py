"""Runs of the training commands that several tests make: their data, their settings, and processes of their own."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.base.wandb_config import WandbConfig
from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.open_target import load_config
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.tiny.models import save_tiny_mtp
from outrider.inference.batch.directory import Response, Shard
from outrider.inference.batch.tasks import TopK
from outrider.inference.core.decode import speculative
from outrider.inference.core.drafter import DraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.shapes.factory import Chain
from outrider.inference.stopping.interface import FixedLength
from outrider.train.core import run_dir
from outrider.train.core.driver import TrainingRun
from outrider.train.eesd import EarlyExitStudent
from outrider.train.settings.drafters import (
    CalibrateConfig,
    DrafterConfig,
    DSparkConfig,
    Eagle3Config,
    EesdConfig,
    FinetuneConfig,
)
from outrider.train.settings.fit import FitConfig
from outrider.train.steps import write_words
from tests.forked import Fork
from tests.tiny import LAYERS, byte_tokenizer, open_stack, random_prompt, reference_generate, save_exit, save_target

ROOT = Path(__file__).parents[2]
TEXT = "the quick brown fox jumps over the lazy dog "
CHAT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FIT = FitConfig(steps=4, batch_rows=4, lr=3e-3, precision="fp32", save_every=2, wandb=WandbConfig(mode="disabled"))

CALIBRATING = replace(FIT, steps=None, epochs=4, batch_rows=2, lr=2e-2, save_every=None)


def write_corpus(folder: Path) -> DataConfig:
    """Sixty lines of much the same text."""
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": f"line {i}: {TEXT * 2}"}) for i in range(60)))
    return DataConfig(
        source="local", path=str(folder / "text.jsonl"), layout="text", heldout_fraction=0.2,
        cache_dir=str(folder / "cache"),
    )  # fmt: skip


@torch.no_grad()
def save_responses(target: Path, folder: Path, chat: bool = False, count: int = 24) -> DataConfig:
    """Responses as data_prep/generate_responses.py leaves them, with the target's top-5: texts continued, or chats."""
    tokenizer, (model, _) = byte_tokenizer(CHAT), open_stack(target)
    responses = []
    for i in range(count):
        record: dict = {"id": f"r{i}", "text": f"{i}: {TEXT}", "prompt_tokens": 6 + i % 3}
        if chat:
            turns = [("user", f"q{i}"), ("assistant", "a fox"), ("user", "and"), ("assistant", "a dog")]
            record = {"id": f"r{i}", "messages": [{"role": role, "content": text} for role, text in turns]}
        document = encode([record], tokenizer, "tokenizer")[0]
        supervised = document.supervised & (np.arange(len(document.ids)) >= record.get("prompt_tokens", 0))
        places = np.flatnonzero(supervised)[: -1 if chat else -2]  # cut off in front of the end token
        top = model(torch.tensor(document.ids)[None]).logits[0, places - 1].log_softmax(-1).topk(5)
        tail = (1 - top.values.exp().sum(-1)).clamp_min(0)
        responses.append(Response(record, TopK(torch.tensor(document.ids[places]), top.indices, top.values, tail)))
    folder.mkdir()
    Shard(responses[: count // 2]).save(folder, 0)
    Shard(responses[count // 2 :]).save(folder, 1)
    cache = str(folder.parent / "cache")
    return DataConfig(source="local", path=f"{folder}/responses-*.jsonl", heldout_fraction=0.2, cache_dir=cache)


def finetuning(target: Path, corpus: DataConfig, out_dir: Path, **changes: Any) -> FinetuneConfig:
    """Four steps of a new tiny drafter; `changes` say what is otherwise."""
    settings = FinetuneConfig(
        target=str(target),
        data=corpus,
        drafter=DrafterConfig(layers=1, hidden=32, heads=2, intermediate=48),
        fit=FIT,
        seq_len=48,
        on_policy_tokens=8,
        decode_prompts=2,
        decode_tokens=8,
        out_dir=str(out_dir),
    )
    return replace(settings, **changes)


def distilling(target: Path, corpus: DataConfig, out_dir: Path, **changes: Any) -> EesdConfig:
    """Six steps of an early exit from layer 2; `changes` say what is otherwise."""
    settings = EesdConfig(
        target=str(target), data=corpus, fit=replace(FIT, steps=6), exit_layer=2, frozen_dtype="float32", seq_len=64,
        eval_rows=4, out_dir=str(out_dir),
    )  # fmt: skip
    return replace(settings, **changes)


def exit_student(model: Any, exit_layer: int, tokens: Tensor | None = None, **changes: Any) -> EarlyExitStudent:
    """The student of `distilling` with these changes, on target layers `model`. tokens: its draft vocabulary."""
    data = DataConfig(source="local", path="responses-*.jsonl")  # which nothing reads
    return EarlyExitStudent(model, distilling(Path(), data, Path(), exit_layer=exit_layer, **changes), tokens)


def heading(target: Path, corpus: DataConfig, out_dir: Path, **changes: Any) -> Eagle3Config:
    """Four steps of an EAGLE-3 head; `changes` say what is otherwise."""
    settings = Eagle3Config(
        target=str(target), data=corpus, fit=FIT, frozen_dtype="float32", seq_len=48, intermediate=48, draft_steps=3,
        eval_rows=2, decode_prompts=2, decode_tokens=8, out_dir=str(out_dir),
    )  # fmt: skip
    return replace(settings, **changes)


def refitting(target: Path, corpus: DataConfig, out_dir: Path, **changes: Any) -> Eagle3Config:
    """The same of an MTP head, which is beside `out_dir`."""
    start = out_dir.parent / "mtp"
    if not start.exists():
        save_tiny_mtp(start, load_config(str(target)))
    return heading(target, corpus, out_dir, intermediate=None, **{"start": str(start), **changes})


def sparking(target: Path, corpus: DataConfig, out_dir: Path, **changes: Any) -> DSparkConfig:
    """Four steps of a DSpark drafter; `changes` say what is otherwise."""
    settings = DSparkConfig(
        target=str(target), data=corpus, fit=FIT, frozen_dtype="float32", seq_len=48, intermediate=48, block=3,
        markov_rank=4, draft_vocabulary=64, eval_rows=2, decode_prompts=2, decode_tokens=8, out_dir=str(out_dir),
    )  # fmt: skip
    return replace(settings, **changes)


def save_for_calibration(folder: Path) -> Path:
    """A target, a drafter that is right about half the time, and text, in `folder`."""
    path = save_target(folder / "target")
    save_exit(folder / "drafter", path, LAYERS - 1, noise=0.1)
    lines = [json.dumps({"text": f"{i} the quick brown fox {i * 7919} jumps " * 3}) for i in range(80)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def calibrating(folder: Path, out_dir: Path, **changes: Any) -> CalibrateConfig:
    """Four epochs of a head for the drafter in `folder` (see `save_for_calibration`)."""
    data = DataConfig(
        source="local", path=str(folder / "text.jsonl"), layout="text", heldout_fraction=0.3,
        cache_dir=str(folder / "c"),
    )  # fmt: skip
    settings = CalibrateConfig(
        checkpoint=str(folder / "drafter"), data=data, fit=CALIBRATING, prompts=20, heldout_prompts=6, seq_len=64,
        new_tokens=24, max_draft=4, out_dir=str(out_dir),
    )  # fmt: skip
    return replace(settings, **changes)


def require_lossless(source: DraftModel, model: Any, stack: LayerStack) -> None:
    """Drafts of `source` change no token that `model`, which `stack` runs, generates."""
    prompt, drafter = random_prompt(20), ModelDrafter(source, Chain(FixedLength(4)))
    rounds = speculative(stack, drafter, prompt, max_new_tokens=20)
    assert [token for r in rounds for token in r.tokens] == reference_generate(model, prompt, 20)


def by_document(model: Any, row: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each document of a packed row [T]: where it is, bool [T], and the logits of `model` for it alone."""
    for document in sorted(set(row["documents"].tolist()) - {-1}):
        part = row["documents"] == document
        with torch.no_grad():
            logits = model(row["input_ids"][part][None]).logits[0]
        yield part, logits


def log(out_dir: Path) -> list[dict[str, float]]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]


def weights(out_dir: Path) -> dict[str, Tensor]:
    """Those of a small LM."""
    return load_file(out_dir / "model.safetensors")


def captured_by(run: Path) -> dict[str, Tensor]:
    """What a calibration has captured, as SPLIT.NAME."""
    (file,) = (run / "captured").glob("*.safetensors")
    return load_file(file)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def command(name: str, config: Any, out_dir: Path) -> list[str]:
    """For `sharded_job.run_command`: the training command of that name, as `config` has it but into `out_dir`."""
    return [name, *write_words(asdict(replace(config, out_dir=str(out_dir))))]


def kill_when(found: Callable[[], object], job: Fork, later: float = 0.0) -> None:
    """SIGKILL to a process that is still running, `later` seconds after there is what it is to be killed at."""
    deadline = time.monotonic() + 120
    while not found() and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.01)
    time.sleep(later)
    job.send_signal(signal.SIGKILL)
    output = job.communicate()
    assert job.returncode == -signal.SIGKILL, output


def evaluated_by(evaluate: Callable[[Any, int], dict[str, float]], watch: Callable[[Any], None] = id) -> Any:
    """A patch: trainings evaluate by this function of their student and the step. watch: is called with the student."""
    real = TrainingRun.fit

    def fit(run: TrainingRun, student: Any, *given: Any, **options: Any) -> Any:
        watch(student)
        return real(run, student, *given, **{**options, "evaluate": partial(evaluate, student)})

    return patch.object(TrainingRun, "fit", fit)


def interrupted_at(step: int, run: Callable[[], None]) -> None:
    """Run with a signal's exception instead of the publication of checkpoint-`step`, which ends it."""
    with pytest.MonkeyPatch.context() as patch:
        real = run_dir.publish

        def publish(staged: Path, final: Path, keep: int) -> None:
            if final.name == f"checkpoint-{step}":
                raise KeyboardInterrupt
            real(staged, final, keep)

        patch.setattr(run_dir, "publish", publish)
        with pytest.raises(KeyboardInterrupt):
            run()


def synthetic(n: int, seed: int) -> dict[str, torch.Tensor]:
    """Outcomes that follow a head of its form exactly; the draft's own confidence alone knows little."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = 5 + 3 * torch.randn(n, 4, generator=generator), 2 + torch.randn(n, 3, generator=generator)
    position = torch.randint(1, 5, (n,), generator=generator)
    confidence = torch.rand(n, generator=generator)
    logit = (target[:, 0] - 5) * (position - 2) + 2 * (draft[:, 1] - 2) + 0.5 * confidence.logit()
    label = (torch.rand(n, generator=generator) < logit.sigmoid()).float()
    return {
        "target_hidden": target, "draft_hidden": draft, "position": position, "label": label,
        "confidence": confidence,
    }  # fmt: skip

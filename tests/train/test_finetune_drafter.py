"""Small-LM drafters end to end on tiny targets: from a config to a directory that decodes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.conversations import encode
from data_prep.generation import TopK
from data_prep.response_files import Response, Shard
from data_prep.rows import load_rows
from data_prep.settings import DataConfig
from draft_models.errors import UserError
from draft_models.losses import IGNORE
from draft_models.processes import join_processes
from draft_models.small_lm import load_small_lm
from draft_models.target import LayerStack, load_config, load_layers, load_tokenizer, open_target
from inference.decode import speculative
from inference.drafting import Chain
from inference.sources import SmallLMSource
from inference.stop_rules import FixedLength
from tests.tiny import byte_tokenizer, open_stack, random_prompt, reference_generate, save_target
from train.settings import DrafterConfig, FinetuneConfig, FitConfig, WandbConfig
from train.small_lm import BEST_FOLDER, REPORT_FILE, Best, finetune_drafter
from train.small_lm_student import (
    OnPolicy,
    SmallLMStudent,
    _row_generator,
    choose_prefix,
    continue_prefixes,
    own_labels,
)
from train.top_k_rows import load_top_k_rows
from train.watch import decode_metrics

ROOT = Path(__file__).parent.parent.parent
FIT = FitConfig(steps=4, batch_rows=4, lr=3e-3, precision="fp32", save_every=2, wandb=WandbConfig(mode="disabled"))
SHAPE = DrafterConfig(layers=1, hidden=32, heads=2, intermediate=48)
VOCABULARY = 260
CHAT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog "


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("models") / "target", kv_heads=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another finished model with the target's vocabulary, to start from."""
    return save_target(tmp_path_factory.mktemp("models") / "small", seed=3, num_hidden_layers=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": f"line {i}: {TEXT * 2}"}) for i in range(60)))
    return DataConfig(
        source="local",
        path=str(folder / "text.jsonl"),
        layout="text",
        heldout_fraction=0.2,
        cache_dir=str(folder / "cache"),
    )


def config(target: Path, corpus: DataConfig, out_dir: Path, **changes: object) -> FinetuneConfig:
    settings = FinetuneConfig(
        target=str(target),
        data=corpus,
        drafter=SHAPE,
        fit=FIT,
        seq_len=48,
        on_policy_tokens=8,
        decode_prompts=2,
        decode_tokens=8,
        out_dir=str(out_dir),
    )
    return replace(settings, **changes)


def weights(out_dir: Path) -> dict[str, Tensor]:
    return load_file(out_dir / "model.safetensors")


def log(out_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def student(target: Path, objective: str = "forward_kl", on_policy: OnPolicy | None = None) -> SmallLMStudent:
    """An untrained drafter beside its teacher, both of the target's own layers: two of them and all four."""
    settings, files = load_config(str(target)), open_target(str(target))
    lm = load_layers(files, settings, [0, 3], dtype=torch.float32).requires_grad_(True)
    teacher = LayerStack(load_layers(files, settings, range(4), dtype=torch.float32))
    return SmallLMStudent(lm, objective, teacher, on_policy)


def batch(rows: int = 3, length: int = 20) -> dict[str, Tensor]:
    """Rows of two documents, the first supervised from its middle on."""
    ids = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))
    half = length // 2
    documents = (torch.arange(length) >= half).long().expand(rows, length)
    labels = ids.roll(-1, 1)
    labels[:, half - 1] = labels[:, -1] = IGNORE
    labels[:, : half // 2] = IGNORE
    positions = (torch.arange(length) % half).expand(rows, length)
    return {"input_ids": ids, "labels": labels, "positions": positions, "documents": documents}


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("start", ["new", "finished", "lora"])
def test_the_drafter_is_an_ordinary_directory_that_helps(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig, start: str, capsys: pytest.CaptureFixture
) -> None:
    """AutoModelForCausalLM loads it, `generate` takes it as assistant, this runtime stays lossless with it."""
    drafter = SHAPE if start == "new" else DrafterConfig(path=str(small))
    changes = {"lora_rank": 2} if start == "lora" else {}
    fit = replace(FIT, steps=24, lr=6e-3, log_every=6, eval_every=12, save_every=24)
    run = config(target, corpus, tmp_path / "out", drafter=drafter, objective="cross_entropy", fit=fit, **changes)
    finetune_drafter(run)
    lines = [line for line in log(tmp_path / "out") if "eval_tau" in line]
    assert [line["step"] for line in lines] == [12, 24]
    assert all({"eval_tau", "eval_accept_1", "eval_accept_4"} <= line.keys() for line in lines)
    losses = [line["loss"] for line in log(tmp_path / "out") if "loss" in line]
    assert losses[-1] < losses[0] - 0.3
    assert f"saved drafter={tmp_path / 'out'} step=" in capsys.readouterr().out

    model, stack = open_stack(target)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config._attn_implementation == "sdpa"
    assert not [name for name in weights(tmp_path / "out") if "lora" in name]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == load_tokenizer(str(target)).get_vocab()
    prompt = random_prompt(20)
    expected = reference_generate(model, prompt, 16)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, assistant_model=exported
    )
    assert out[0, 20:].tolist() == expected
    source = SmallLMSource(load_small_lm(str(tmp_path / "out"), load_tokenizer(str(target)), dtype=torch.float32))
    rounds = list(speculative(stack, source, Chain(FixedLength(3)), prompt, max_new_tokens=16))
    assert [token for r in rounds for token in r.tokens] == expected


def test_only_adapters_are_trained_and_stored(tmp_path: Path, target: Path, small: Path, corpus: DataConfig) -> None:
    finetune_drafter(config(target, corpus, tmp_path / "out", drafter=DrafterConfig(path=str(small)), lora_rank=2))
    stored = load_file(tmp_path / "out" / "checkpoint-4" / "model.safetensors")
    assert stored
    assert all("lora_" in name for name in stored)
    before, after = weights(small), weights(tmp_path / "out")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)  # not embedding, head or norms


@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"])
def test_distillation_makes_the_drafter_like_the_target(tmp_path: Path, corpus: DataConfig, objective: str) -> None:
    """The target predicts its text badly; a drafter that learns from it is accepted more than one that does not."""
    target = save_target(tmp_path / "target", kv_heads=2, num_hidden_layers=2, seed=1)
    shape = DrafterConfig(path=str(save_target(tmp_path / "small", seed=1, num_hidden_layers=2, kv_heads=2)))
    noisy = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(
                0.1 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
    noisy.save_pretrained(shape.path)
    fit = replace(FIT, steps=20, log_every=5, lr=1e-3, save_every=20)
    finetune_drafter(config(target, corpus, tmp_path / "out", drafter=shape, objective=objective, fit=fit))
    losses = [line["loss"] for line in log(tmp_path / "out") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]


def test_the_exported_drafter_is_the_best_not_the_last(
    tmp_path: Path, target: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([1.5, 2.5, 2.5, 2.0])
    seen: list[dict[str, Tensor]] = []

    def decode(_stack: object, source: SmallLMSource, *_: object) -> dict[str, float]:
        seen.append({name: p.clone() for name, p in source.lm.named_parameters()})
        return {"tau": next(taus)}

    monkeypatch.setattr("train.small_lm.decode_metrics", decode)
    finetune_drafter(config(target, corpus, tmp_path / "out", fit=replace(FIT, eval_every=1)))
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert report["step"] == 2
    assert report["metrics"]["tau"] == 2.5
    assert report["last_metrics"]["tau"] == 2.0
    exported = weights(tmp_path / "out")
    assert torch.equal(exported["lm_head.weight"], seen[1]["head.weight"])
    assert not torch.equal(exported["lm_head.weight"], seen[2]["head.weight"])


def test_best_weights_belong_to_their_run(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    first = Best(tmp_path / "best", {"seed": 0})
    first.offer(layer, 3, {"tau": 2.0})
    other = Best(tmp_path / "best", {"seed": 1})
    with pytest.raises(UserError, match="best weights are missing"):
        other.restore(layer)
    kept = layer.weight.detach().clone()
    torch.nn.init.zeros_(layer.weight)
    first.offer(layer, 4, {"tau": 2.0})  # not better
    assert first.restore(layer) == (3, {"tau": 2.0})
    assert torch.equal(layer.weight, kept)
    other.offer(layer, 1, {"tau": 1.1})  # another run's are not in the way
    assert other.restore(layer) == (1, {"tau": 1.1})


def test_the_best_weights_outlast_a_change_of_processes(
    tmp_path: Path, target: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(target, corpus, tmp_path / "out", fit=replace(FIT, steps=1))
    finetune_drafter(run)
    before = weights(tmp_path / "out")
    state = join_processes()
    two = SimpleNamespace(is_main_process=True, device=state.device, num_processes=2, wait_for_everyone=lambda: None)
    monkeypatch.setattr("train.small_lm.join_processes", lambda: two)
    finetune_drafter(replace(run, resume=True))
    assert same(before, weights(tmp_path / "out"))


def test_gradient_checkpointing_changes_nothing(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters too, whose layers' inputs need no gradient."""
    calls: list[object] = []
    real = torch.utils.checkpoint.checkpoint

    def counted(*args: object, **options: object) -> object:
        calls.append(options)
        return real(*args, **options)

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", counted)
    fit = replace(FIT, steps=2)
    run = config(target, corpus, tmp_path / "kept", fit=fit, drafter=DrafterConfig(path=str(small)), lora_rank=2)
    finetune_drafter(run)
    assert not calls
    recomputed = replace(fit, gradient_checkpointing=True)
    finetune_drafter(replace(run, out_dir=str(tmp_path / "recomputed"), fit=recomputed))
    assert len(calls) == 2 * 2  # layers and steps
    assert same(weights(tmp_path / "kept"), weights(tmp_path / "recomputed"))


def test_what_is_watched_is_what_real_decoding_comes_to(tmp_path: Path, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            parameter.add_(0.05 * parameter.std() * noise)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    _, stack = open_stack(target)
    source = SmallLMSource(load_small_lm(str(tmp_path), byte_tokenizer(), dtype=torch.float32))
    prompts = [random_prompt(12, seed) for seed in range(3)]
    metrics = decode_metrics(stack, source, prompts, 20)
    drafting = [speculative(stack, source, Chain(FixedLength(4)), p, max_new_tokens=20) for p in prompts]
    rounds = [r for one in drafting for r in list(one)[1:]]
    assert metrics["tau"] == pytest.approx(sum(len(r.tokens) for r in rounds) / len(rounds))
    for position in range(1, 5):
        reached = [r.accepted >= position for r in rounds if r.drafted >= position]
        assert metrics[f"accept_{position}"] == pytest.approx(sum(reached) / len(reached))
    assert 0 < metrics["accept_4"] < metrics["accept_1"] < 1
    assert metrics.keys() == {"tau", "accept_1", "accept_2", "accept_3", "accept_4"}


def test_norms_that_do_not_move_are_warned_of(
    tmp_path: Path, target: Path, corpus: DataConfig, capsys: pytest.CaptureFixture
) -> None:
    finetune_drafter(config(target, corpus, tmp_path / "moved"))
    assert "warning" not in capsys.readouterr().out
    assert log(tmp_path / "moved")[-1]["eval_norms_moved"] == 1
    finetune_drafter(config(target, corpus, tmp_path / "stuck", fit=replace(FIT, lr=1e-9)))
    assert "warning: step 4: none of the 3 trained norms has moved, rounded to torch.float32" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------- exactness


def launch(run: FinetuneConfig, *launcher: str) -> subprocess.Popen:
    overrides = {
        "target": run.target,
        "data": "local",
        "data.path": run.data.path[0],
        "data.layout": "text",
        "data.heldout_fraction": 0.2,
        "data.cache_dir": run.data.cache_dir,
        "out_dir": run.out_dir,
        "resume": str(run.resume).lower(),
        "drafter": "pretrained" if run.drafter.path else "tiny",
        **({"drafter.path": run.drafter.path} if run.drafter.path else {}),
        "lora_rank": run.lora_rank,
        "on_policy": run.on_policy,
        "on_policy_tokens": run.on_policy_tokens,
        "seq_len": run.seq_len,
        "decode_prompts": run.decode_prompts,
        "decode_tokens": run.decode_tokens,
        "fit.epochs": "null",
        "fit.steps": run.fit.steps,
        "fit.batch_rows": 4,
        "fit.lr": 3e-3,
        "fit.warmup": 0,
        "fit.precision": "fp32",
        "fit.schedule": "linear",
        "fit.save_every": run.fit.save_every,
        "fit.eval_every": run.fit.eval_every or "null",
        "fit.wandb.mode": "disabled",
    }
    return subprocess.Popen(
        [*launcher, str(ROOT / "train/finetune_drafter.py"), *(f"{key}={value}" for key, value in overrides.items())],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("lora", [0, 2])
def test_sigkill_then_resume_ends_with_the_same_bits(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig, lora: int
) -> None:
    """With on-policy steps, and with the best weights behind the kill or in front of it."""
    fit = replace(FIT, steps=24, save_every=4, eval_every=5)
    run = config(target, corpus, tmp_path / "killed", fit=fit, lora_rank=lora, on_policy=0.5,
                 drafter=DrafterConfig(path=str(small)))  # fmt: skip
    job = launch(run, sys.executable)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("checkpoint-*")) and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.02)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    assert job.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "config.json").exists()
    finetune_drafter(replace(run, resume=True))
    finetune_drafter(replace(run, out_dir=str(tmp_path / "whole")))
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    reports = [json.loads((tmp_path / name / REPORT_FILE).read_text()) for name in ("killed", "whole")]
    assert reports[0]["step"] == reports[1]["step"]
    last = [load_file(tmp_path / name / "checkpoint-24" / "model.safetensors") for name in ("killed", "whole")]
    assert same(*last)


def test_two_processes_equal_one(tmp_path: Path, target: Path, small: Path, corpus: DataConfig) -> None:
    """On-policy steps included: what a row samples depends on the row, not on the process that has it."""
    run = config(target, corpus, tmp_path / "one", drafter=DrafterConfig(path=str(small)), on_policy=0.5)
    finetune_drafter(run)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    job = launch(replace(run, out_dir=str(tmp_path / "two")), sys.executable, *torchrun)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out
    assert_close_to_the_same(tmp_path / "one", tmp_path / "two", small)


def test_accumulation_equals_one_batch(tmp_path: Path, target: Path, small: Path, corpus: DataConfig) -> None:
    run = config(target, corpus, tmp_path / "whole", drafter=DrafterConfig(path=str(small)), on_policy=0.5)
    finetune_drafter(run)
    finetune_drafter(replace(run, out_dir=str(tmp_path / "parts"), fit=replace(FIT, micro_batch_rows=1)))
    assert_close_to_the_same(tmp_path / "whole", tmp_path / "parts", small)


def assert_close_to_the_same(one: Path, other: Path, start: Path) -> None:
    first, second, untrained = weights(one), weights(other), weights(start)
    assert any((first[name] - untrained[name]).abs().max() > 1e-3 for name in first)
    for name in first:
        torch.testing.assert_close(
            second[name], first[name], rtol=1e-4, atol=1e-4
        )  # Adam makes steps of lr = 3e-3 of tiny gradients too


def test_a_full_disk_leaves_the_best_and_the_checkpoint(
    tmp_path: Path, target: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([1.5, 2.5])
    monkeypatch.setattr("train.small_lm.decode_metrics", lambda *_: {"tau": next(taus)})
    real = os.replace
    run = config(target, corpus, tmp_path / "out", fit=replace(FIT, eval_every=2))

    def full(source: str, destination: str) -> None:
        if str(destination).endswith("best/model.safetensors") and Path(destination).exists():
            raise OSError(28, "No space left on device")
        real(source, destination)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        finetune_drafter(run)
    assert [p.name for p in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    assert [p.name for p in (tmp_path / "out" / BEST_FOLDER).iterdir()] == ["model.safetensors"]
    monkeypatch.setattr(os, "replace", real)
    taus = iter([2.5])
    finetune_drafter(replace(run, resume=True))
    assert json.loads((tmp_path / "out" / REPORT_FILE).read_text())["step"] == 4


def test_resume_with_other_settings_is_refused(tmp_path: Path, target: Path, corpus: DataConfig) -> None:
    run = config(target, corpus, tmp_path / "out")
    finetune_drafter(run)
    for change in ({"objective": "reverse_kl"}, {"decode_tokens": 9}, {"fit": replace(FIT, eval_every=2)}):
        with pytest.raises(UserError, match=r"objective=|decode_tokens=|eval_every="):
            finetune_drafter(replace(run, resume=True, **change))
    before = weights(tmp_path / "out")
    finetune_drafter(replace(run, resume=True))  # finished: exported again
    assert same(before, weights(tmp_path / "out"))


# ------------------------------------------------------------------------------------------------ the student


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_the_loss_is_that_of_each_document_alone(tmp_path: Path, architecture: str) -> None:
    """Packed rows against stock models on one document at a time, windows and grouped heads included."""
    path = save_target(tmp_path / "target", architecture, kv_heads=2)
    one, rows = student(path), batch(length=40)
    whole = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    small = one.merged(torch.float32)
    small.set_attn_implementation("eager")
    expected = torch.zeros(())
    for ids, labels, documents in zip(rows["input_ids"], rows["labels"], rows["documents"], strict=True):
        for document in (0, 1):
            part = documents == document
            keep = labels[part] != IGNORE
            p, q = (model(ids[part][None]).logits[0][keep].softmax(-1) for model in (whole, small))
            expected = expected + (p * (p / q).log()).sum()
    torch.testing.assert_close(one.eval()(**rows)["loss_sum"], expected.detach(), rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_drafter_and_not_the_teacher(target: Path) -> None:
    one = student(target, "jensen_shannon", OnPolicy(1.0, 6, 0, None))
    one.train()
    with torch.autocast("cpu", torch.bfloat16):
        one(**batch())["loss_sum"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in one.parameters())
    assert one.teacher is not None
    assert all(p.grad is None for p in one.teacher.parameters())
    assert not [name for name, _ in one.named_parameters() if not name.startswith("lm.")]


def test_a_step_is_on_policy_as_often_as_asked() -> None:
    share = OnPolicy(0.3, 8, 0, None)
    due = [share.due(step) for step in range(2000)]
    assert 0.25 < sum(due) / 2000 < 0.35
    assert due == [share.due(step) for step in range(2000)]
    assert due != [OnPolicy(0.3, 8, 1, None).due(step) for step in range(2000)]
    assert all(OnPolicy(1.0, 8, 0, None).due(step) for step in range(50))


def test_on_policy_is_the_divergence_on_own_samples(target: Path) -> None:
    """Written out row by row with whole forwards: sample, score, mean, weight by the row's supervised tokens."""
    one, rows = student(target, "reverse_kl", OnPolicy(1.0, 6, 5, None)), batch()
    one.begin_step(3)
    got = one.train()(**rows)["loss_sum"]
    whole, _ = open_stack(target)
    expected = torch.zeros(())
    for ids, labels, positions in zip(rows["input_ids"], rows["labels"], rows["positions"], strict=True):
        generator = _row_generator(5, 3, ids)
        prefix = choose_prefix(ids, labels, positions, 6, generator)
        text, _ = continue_prefixes(one.lm, [prefix], torch.rand(1, 6, generator=generator), VOCABULARY)
        places = slice(len(prefix) - 1, len(prefix) + 5)
        p, q = (model(text).logits[0, places].softmax(-1) for model in (whole, one.lm))
        expected = expected + (q * (q / p).log()).sum(-1).mean() * (labels != IGNORE).sum()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert got.requires_grad

    with torch.no_grad():
        one.begin_step(4)
        assert (one(**rows)["loss_sum"] - got).abs() > 1e-3  # other prefixes, other samples
        one.begin_step(3)
        assert (one(**rows)["loss_sum"] - got).abs() < 1e-4
        assert (one.eval()(**rows)["loss_sum"] - got).abs() > 1e-3  # evaluation is on the text


def test_on_policy_needs_whole_parameters(target: Path) -> None:
    sampling, plain = student(target, on_policy=OnPolicy(0.5, 6, 0, None)), student(target)
    sampling.begin_step(1)
    for one in (sampling, plain):
        next(one.parameters()).ds_id = 0  # the mark of ZeRO-3
    with pytest.raises(UserError, match="on_policy: needs whole parameters; use ddp or zero2, or on_policy=0"):
        sampling.begin_step(2)
    plain.begin_step(2)


def test_a_continuation_is_drawn_from_the_drafter(target: Path) -> None:
    """Each token is where the cumulative probability after its own text passes the number, whatever is beside it."""
    lm = student(target).lm
    prefixes = [torch.tensor(random_prompt(length, length)) for length in (3, 9, 5)]
    numbers = torch.rand(3, 5, generator=torch.Generator().manual_seed(2))
    ids, sampled = continue_prefixes(lm, prefixes, numbers, VOCABULARY)
    for prefix, row, tokens, uniform in zip(prefixes, ids, sampled, numbers, strict=True):
        text = prefix.tolist()
        assert row[: len(text)].tolist() == text
        assert row[len(text) : len(text) + 5].tolist() == tokens.tolist()
        for token, number in zip(tokens.tolist(), uniform, strict=True):
            cumulative = lm(torch.tensor([text])).logits[0, -1].softmax(-1).cumsum(-1)
            assert cumulative[token] >= number - 1e-5
            assert token == 0 or cumulative[token - 1] <= number + 1e-5
            text.append(token)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(continue_prefixes(lm, prefixes, numbers, VOCABULARY)[0], ids)  # in full precision always
    narrow, _ = continue_prefixes(lm, prefixes, numbers, 50)
    assert all((row[len(p) :] < 50).all() for row, p in zip(narrow, prefixes, strict=True))


def test_a_prefix_is_the_document_up_to_a_supervised_place() -> None:
    rows = {name: value[0] for name, value in batch(length=20).items()}
    seen = set()
    for seed in range(60):
        prefix = choose_prefix(
            rows["input_ids"], rows["labels"], rows["positions"], 15, torch.Generator().manual_seed(seed)
        ).tolist()
        assert 1 <= len(prefix) <= 5
        seen.add(tuple(prefix))
    ids, places = rows["input_ids"].tolist(), (rows["labels"] != IGNORE).nonzero()[:, 0].tolist()
    expected = {tuple(ids[max(place - place % 10, place - 4) : place + 1]) for place in places}
    assert seen == expected


def test_own_labels_end_with_the_first_end_token() -> None:
    ids = torch.tensor([[1, 2, 7, 8, 9, 7], [3, 4, 5, 6, 8, 0]])
    sampled = torch.tensor([[7, 8, 9], [4, 5, 6]])
    labels = own_labels(ids, [2, 1], sampled, 8)
    assert labels.tolist() == [[IGNORE, 7, 8, IGNORE, IGNORE, IGNORE], [4, 5, 6, IGNORE, IGNORE, IGNORE]]
    assert own_labels(ids, [2, 1], sampled, None)[0].tolist() == [IGNORE, 7, 8, 9, IGNORE, IGNORE]


# ----------------------------------------------------------------------------------------------- cached top-k


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


@pytest.mark.parametrize("chat", [False, True])
@torch.no_grad()
def test_cached_rows_say_what_the_target_says(tmp_path: Path, target: Path, chat: bool) -> None:
    """At every label of every row: the law is the target's after exactly the tokens before it in its document."""
    data = save_responses(target, tmp_path / "responses", chat)
    rows = load_top_k_rows(data, byte_tokenizer(CHAT), 120)
    plain = load_rows(data, byte_tokenizer(CHAT), 120, "train")
    model, _ = open_stack(target)
    labels = 0
    for row in (rows[i] for i in range(len(rows))):
        assert all(len(value) == 120 for value in row.values())
        for document in set(row["documents"].tolist()) - {-1}:
            part = row["documents"] == document
            ids, wanted = row["input_ids"][part], row["labels"][part]
            assert row["positions"][part].tolist() == list(range(len(ids)))
            keep = wanted != IGNORE
            assert wanted[:-1][keep[:-1]].tolist() == ids[1:][keep[:-1]].tolist()
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[keep]
            top = row["top_logprobs"][part][keep]
            torch.testing.assert_close(logprobs.gather(-1, row["top_ids"][part][keep]), top, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(1 - top.exp().sum(-1), row["tail"][part][keep], rtol=2e-2, atol=5e-3)
            labels += int(keep.sum())
        assert (row["labels"][row["documents"] < 0] == IGNORE).all()
    # all that is supervised, but the end token that each response was cut off from (and a text's prompt)
    records = plain.counts["records"]
    if chat:
        assert labels == plain.counts["supervised"] - records
    else:
        assert plain.counts["supervised"] - 9 * records < labels < plain.counts["supervised"] - 6 * records
    assert load_top_k_rows(data, byte_tokenizer(CHAT), 120).key == rows.key
    shorter = load_top_k_rows(data, byte_tokenizer(CHAT), 30)
    assert max(int((shorter[i]["documents"] >= 0).sum()) for i in range(len(shorter))) <= 30


def test_a_cached_run_learns_and_resumes(tmp_path: Path, target: Path, small: Path) -> None:
    data = save_responses(target, tmp_path / "responses")
    run = config(target, data, tmp_path / "out", teacher="cached", drafter=DrafterConfig(path=str(small)),
                 seq_len=64, fit=replace(FIT, steps=18, lr=6e-3, log_every=1, save_every=6))  # fmt: skip
    finetune_drafter(run)
    losses = [line["loss"] for line in log(tmp_path / "out") if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    before = weights(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-18")
    finetune_drafter(replace(run, resume=True))
    assert same(before, weights(tmp_path / "out"))


def test_cached_rows_are_of_the_files_and_records_asked_for(tmp_path: Path, target: Path) -> None:
    data = replace(save_responses(target, tmp_path / "responses"), heldout_fraction=0.5)

    def texts(**changes: object) -> set[str]:
        rows = load_top_k_rows(replace(data, **changes), byte_tokenizer(CHAT), 120)
        parts = [(rows[i]["input_ids"], rows[i]["documents"]) for i in range(len(rows))]
        return {str(ids[own == n].tolist()) for ids, own in parts for n in set(own.tolist()) - {-1}}

    every = texts()
    first = texts(path=str(tmp_path / "responses" / "responses-00000.jsonl"))
    second = texts(path=str(tmp_path / "responses" / "responses-00001.jsonl"))
    assert first
    assert second
    assert first | second == every
    assert not first & second
    assert texts(max_records=12) == first  # of which those to be held out count too
    assert texts(max_records=6) < first


def test_cached_needs_responses_with_top_k(tmp_path: Path, target: Path, corpus: DataConfig) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    Shard([Response({"id": "a", "text": TEXT, "prompt_tokens": 3}, None)]).save(plain, 0)
    data = replace(corpus, path=str(plain / "responses-00000.jsonl"))
    with pytest.raises(UserError, match=r"no response with the target's top-k .*without_top_k=1.*top_k_logits=K"):
        load_top_k_rows(data, byte_tokenizer(), 64)


# -------------------------------------------------------------------------------------------------- bad input


def test_fsdp_is_refused_at_once(
    tmp_path: Path, target: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"finetune_drafter: .*FSDP.*; use ddp or DeepSpeed"):
        finetune_drafter(config(target, corpus, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_bad_input_names_what_is_wrong_before_anything_is_written(
    tmp_path: Path, target: Path, corpus: DataConfig
) -> None:
    out_dir = tmp_path / "out"
    other = save_target(tmp_path / "other")
    vocabulary = byte_tokenizer()
    vocabulary.add_tokens(["<extra>"])
    vocabulary.save_pretrained(other)
    bad = {
        "no such directory": {"target": str(tmp_path / "nowhere")},
        "is not the target's": {"drafter": DrafterConfig(path=str(other))},
        "seq_len=999: the target's context is 256": {"seq_len": 999},
        "decode_tokens=256: expected less": {"decode_tokens": 256},
    }
    for message, changes in bad.items():
        with pytest.raises(UserError, match=message):
            finetune_drafter(replace(config(target, corpus, out_dir), **changes))
        assert not list(out_dir.iterdir())
    impossible = {
        "objective='kl': expected one of cross_entropy, forward_kl": {"objective": "kl"},
        r"on_policy=0.5: expected 0 without a target": {"on_policy": 0.5, "objective": "cross_entropy"},
        r"on_policy_tokens=48: expected": {"on_policy": 0.5, "on_policy_tokens": 48},
        "lora_rank=4: expected 0 for a drafter from random weights": {"lora_rank": 4},
        "lora_alpha=8: expected null": {"lora_alpha": 8},
        "teacher='cached': expected online": {"teacher": "cached", "objective": "cross_entropy"},
        "heldout_fraction": {"data": replace(corpus, heldout_fraction=0.0)},
    }
    for message, changes in impossible.items():
        with pytest.raises(UserError, match=message):
            replace(config(target, corpus, out_dir), **changes)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({}, "layers=None: expected a positive number, or a path"),
        ({"path": "x", "layers": 2}, "path='x': expected no shape beside it"),
        ({"layers": 1, "hidden": 30, "heads": 4, "intermediate": 8}, "hidden=30: expected an even multiple"),
        ({"layers": 1, "hidden": 32, "heads": 4, "intermediate": 8, "kv_heads": 3}, "kv_heads=3: expected a divisor"),
        ({"layers": 1, "hidden": 32, "heads": 4, "intermediate": 8, "revision": "r"}, "revision='r': expected a path"),
    ],
)
def test_a_drafter_is_a_path_or_a_shape(shape: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DrafterConfig(**shape)

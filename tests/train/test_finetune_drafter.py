"""Small-LM drafters end to end on tiny targets: from a config to a directory that decodes."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.planted_faults import rope_scaled
from outrider.base.errors import UserError
from outrider.base.settings import RunConfig
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.open_target import load_config, load_tokenizer
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.drafters.shaped import ModelDrafter
from outrider.inference.drafters.small_lm import SmallLMSource
from outrider.inference.shapes.factory import Chain
from outrider.inference.stopping.interface import FixedLength
from outrider.train.core.driver import BEST_FOLDER, run_training
from outrider.train.core.training import Trained, Training
from outrider.train.parts.heldout import Decoding
from outrider.train.recipes.small_lm import finetune_drafter
from outrider.train.settings.drafters import DrafterConfig
from outrider.train.students.small_lm import drafter_config, start_lm
from tests.full_disk import largest_file
from tests.refusals import refusal
from tests.tiers import quick_where, typical_where
from tests.tiny import VOCABULARY, byte_tokenizer, open_stack, random_prompt, reference_generate, save_target
from tests.train.fit_job import TinyModel, tiny_rows
from tests.train.fit_runs import trained_weights
from tests.train.jobs import FIT, by_document, finetuning, log, require_lossless, same, weights

# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    "start",
    typical_where(
        {"new", "lora"}.__contains__, quick_where(lambda start: start == "lora", ["new", "finished", "lora"])
    ),
)
@pytest.mark.slow
def test_the_drafter_is_an_ordinary_directory_that_helps(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig, start: str, capsys: pytest.CaptureFixture
) -> None:
    """AutoModelForCausalLM loads it, `generate` takes it as assistant, this runtime stays lossless with it."""
    changes = {} if start == "new" else {"drafter": DrafterConfig(path=str(small))}
    changes |= {"lora_rank": 2} if start == "lora" else {}
    fit = replace(FIT, steps=24, lr=6e-3, log_every=6, eval_every=12, save_every=24)
    run = finetuning(target, corpus, tmp_path / "out", objective="cross_entropy", fit=fit, **changes)
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
    require_lossless(source, model, stack)


def test_only_adapters_are_trained_and_stored(tmp_path: Path, target: Path, small: Path, corpus: DataConfig) -> None:
    finetune_drafter(finetuning(target, corpus, tmp_path / "out", drafter=DrafterConfig(path=str(small)), lora_rank=2))
    stored = load_file(tmp_path / "out" / "checkpoint-4" / "model.safetensors")
    assert stored
    assert all("lora_" in name for name in stored)
    before, after = weights(small), weights(tmp_path / "out")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)  # not embedding, head or norms


def trained_tiny(out_dir: Path, taus: list[float], *, resume: bool = False) -> None:
    """Four steps of a tiny model that has one of these τ after every second one; the best weights are saved."""
    left, model, seen = iter(taus), TinyModel(), list[dict[str, Tensor]]()

    def evaluate(_: nn.Module, step: int) -> dict[str, float]:
        seen.append(trained_weights(model))
        return {"tau": next(left)}

    def save(trained: Trained) -> None:
        assert trained.metrics == {"tau": max(taus)}
        assert same(trained_weights(model), seen[taus.index(max(taus))])

    config = replace(FIT, steps=4, eval_every=2)
    training = Training(model, tiny_rows(), config, {}, evaluate, save, keeps_best=True)
    run_training(RunConfig(out_dir=str(out_dir), resume=resume), lambda _: training)


def test_best_weights_of_a_run_without_a_checkpoint_are_not_another_runs(tmp_path: Path) -> None:
    with pytest.raises(StopIteration):
        trained_tiny(tmp_path, [9.0])
    shutil.rmtree(tmp_path / "checkpoint-2")
    trained_tiny(tmp_path, [1.5, 1.2])


def test_a_full_disk_leaves_the_best_and_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StopIteration):
        trained_tiny(tmp_path, [1.5])
    before = (tmp_path / BEST_FOLDER / "model.safetensors").read_bytes()
    with largest_file(64), pytest.raises(UserError, match="cannot be written"):
        trained_tiny(tmp_path, [2.5], resume=True)
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert {p.name: p.read_bytes() for p in (tmp_path / BEST_FOLDER).iterdir()} == {"model.safetensors": before}
    trained_tiny(tmp_path, [2.5], resume=True)


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
    eos = {list(autoregressive(stack, prompts[0], max_new_tokens=7))[-1].tokens[-1]}
    metrics = Decoding(prompts, 20, eos)(stack, source)
    limits: dict[str, Any] = {"max_new_tokens": 20, "eos": eos}
    drafting = [list(speculative(stack, ModelDrafter(source, Chain(FixedLength(4))), p, **limits)) for p in prompts]
    assert sum(len(r.tokens) for r in drafting[0]) <= 7  # what comes after a text's end is not watched
    rounds = [r for one in drafting for r in one[1:]]
    assert metrics["tau"] == pytest.approx(sum(len(r.tokens) for r in rounds) / len(rounds))
    for position in range(1, 5):
        reached = [r.accepted >= position for r in rounds if r.drafted >= position]
        assert metrics[f"accept_{position}"] == pytest.approx(sum(reached) / len(reached))
    assert 0 < metrics["accept_4"] < metrics["accept_1"] < 1
    assert metrics.keys() == {"tau", "accept_1", "accept_2", "accept_3", "accept_4"}


def test_what_is_watched_fits_the_drafters_own_context(tmp_path: Path, target: Path, corpus: DataConfig) -> None:
    drafter = DrafterConfig(path=str(save_target(tmp_path / "short", "opt", max_position_embeddings=64)))
    run = finetuning(target, corpus, tmp_path / "out", fit=replace(FIT, steps=1), drafter=drafter, decode_tokens=60)
    finetune_drafter(run)
    assert log(tmp_path / "out")[-1]["eval_tau"] >= 1


def test_the_analytic_tau_and_the_agreement_are_the_whole_targets(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig
) -> None:
    """Of the rows that the prompts begin, as stock models have each of their documents; also without distillation."""
    run = finetuning(target, corpus, tmp_path / "out", fit=replace(FIT, steps=1), objective="cross_entropy",
                     drafter=DrafterConfig(path=str(small)))  # fmt: skip
    finetune_drafter(run)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (target, tmp_path / "out")]
    rows = load_rows(corpus, load_tokenizer(str(target)), run.seq_len, "heldout", max_rows=run.decode_prompts)
    taus, agreed = [], []
    for row in (rows[i] for i in range(len(rows))):
        for (part, target_logits), (_, logits) in zip(*(by_document(model, row) for model in models), strict=True):
            p, q = target_logits.softmax(-1), logits.softmax(-1)
            known = row["labels"][part] != IGNORE
            agreed += (p.argmax(-1) == q.argmax(-1))[known].tolist()
            alpha = torch.minimum(p, q).sum(-1)
            starts = [i for i in range(len(alpha) - 3) if known[i : i + 4].all()]
            taus += [1 + alpha[i : i + 4].cumprod(0).sum().item() for i in starts]
    found = log(tmp_path / "out")[-1]
    assert found["eval_tau_analytic"] == pytest.approx(sum(taus) / len(taus), rel=1e-4)
    assert found["eval_top1_target"] == pytest.approx(sum(agreed) / len(agreed))


def test_norms_that_do_not_move_are_warned_of(
    tmp_path: Path, target: Path, corpus: DataConfig, capsys: pytest.CaptureFixture
) -> None:
    finetune_drafter(finetuning(target, corpus, tmp_path / "moved"))
    assert "norms has moved" not in capsys.readouterr().err
    assert log(tmp_path / "moved")[-1]["eval_norms_moved"] == 1
    finetune_drafter(finetuning(target, corpus, tmp_path / "stuck", fit=replace(FIT, lr=1e-9)))
    assert "warning: step 4: none of the 3 trained norms has moved, rounded to torch.float32" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- bad input


def test_what_is_started_is_what_was_asked_for(target: Path, small: Path, corpus: DataConfig) -> None:
    settings, tokenizer = load_config(str(target)), load_tokenizer(str(target))
    asked = DrafterConfig(layers=3, hidden=32, heads=4, kv_heads=2, intermediate=48, tied=True)
    shape = drafter_config(asked, settings, tokenizer).to_dict()
    assert shape | {
        "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "tie_word_embeddings": True, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    } == shape  # fmt: skip
    for given, expected in ((None, 4), (7.0, 7)):
        run = finetuning(target, corpus, Path("out"), lora_rank=2, lora_alpha=given,
                         drafter=DrafterConfig(path=str(small)))  # fmt: skip
        lm: Any = start_lm(run, load_config(str(small)), tokenizer, torch.device("cpu"))
        assert lm.peft_config["default"].lora_alpha == expected


def test_a_drafter_must_prove_itself(target: Path, small: Path, corpus: DataConfig) -> None:
    run = finetuning(target, corpus, Path("out"), drafter=DrafterConfig(path=str(small)))
    with rope_scaled(1.01), pytest.raises(UserError, match=r"drafter\.path=.* differ from its own forward's"):
        start_lm(run, load_config(str(small)), load_tokenizer(str(target)), torch.device("cpu"))


def test_a_new_drafter_is_saved_as_the_target_is(tmp_path: Path, corpus: DataConfig) -> None:
    path = save_target(tmp_path / "target", dtype="bfloat16")
    finetune_drafter(finetuning(path, corpus, tmp_path / "out", fit=replace(FIT, steps=1)))
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}


def test_resume_with_another_drafter_to_start_from_is_refused(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig
) -> None:
    path = shutil.copytree(small, tmp_path / "small")
    run = finetuning(target, corpus, tmp_path / "out", drafter=DrafterConfig(path=str(path)), fit=replace(FIT, steps=1))
    finetune_drafter(run)
    described = (path / "config.json").read_text()
    (path / "config.json").write_text(described.replace('"rope_theta": 10000.0', '"rope_theta": 500000.0'))
    with pytest.raises(
        UserError, match=r"drafter_model\.config\.rope_parameters\.rope_theta=500000\.0 \(was 10000\.0\)"
    ):
        finetune_drafter(replace(run, resume=True))
    (path / "config.json").write_text(described)
    save_target(path, seed=4, num_hidden_layers=2)
    refusal(r"drafter_model\.tensors\.lm_head=", finetune_drafter, replace(run, resume=True))

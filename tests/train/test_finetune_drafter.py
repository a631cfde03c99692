"""Small-LM drafters end to end on tiny targets: from a config to a directory that decodes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.base.errors import UserError
from outrider.base.settings import RunConfig
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.draft_vocabulary import TOKENS_FILE, narrow, read_draft_vocabulary, widen
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.narrowed import DraftVocabulary, is_narrowed
from outrider.draft_models.targets.open_target import load_config, load_tokenizer, open_target, read_config
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel, SmallLMPlugin
from outrider.inference.loading.memory_plan import Storage, weight_bytes
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.factory import Chain
from outrider.inference.stopping.interface import FixedLength
from outrider.train.core.driver import BEST_FOLDER, training_run
from outrider.train.core.training import FitResult
from outrider.train.finetune_drafter import SmallLMStudent, drafter_config, finetune_drafter, start_lm
from outrider.train.parts.capture import TextToContinue
from outrider.train.parts.heldout import Decoding
from outrider.train.parts.on_policy import OnPolicy, continue_prefixes
from outrider.train.settings.drafters import DrafterConfig
from outrider.train.settings.fit import FitConfig
from tests.full_disk import largest_file
from tests.inference.evaluate.evaluating import QUESTIONS, evaluate
from tests.refusals import refusal
from tests.support.planted_faults import rope_scaled
from tests.tiers import quick_where, typical_where
from tests.tiny import VOCABULARY, byte_tokenizer, open_stack, random_prompt, reference_generate, save_target
from tests.train.fit_job import TinyModel, tiny_rows
from tests.train.fit_runs import trained_weights
from tests.train.jobs import (
    FIT,
    by_document,
    finetuning,
    log,
    require_lossless,
    same,
    save_responses,
    weights,
    write_corpus,
)


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
    source = SmallLMDraftModel(load_small_lm(str(tmp_path / "out"), load_tokenizer(str(target)), dtype=torch.float32))
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

    def evaluate(_: int) -> dict[str, float]:
        seen.append(trained_weights(model))
        return {"tau": next(left)}

    config = replace(FIT, steps=4, eval_every=2)
    with training_run(RunConfig(out_dir=str(out_dir), resume=resume)) as run:
        result = run.fit(model, tiny_rows(), config, identity={}, evaluate=evaluate, keeps_best=True)
    assert result is not None
    assert result.metrics == {"tau": max(taus)}
    assert same(trained_weights(model), seen[taus.index(max(taus))])


def test_a_longer_run_that_ends_before_it_saves_is_not_finished(tmp_path: Path) -> None:
    config, model = replace(FIT, steps=2), TinyModel()

    def train(config: FitConfig, resume: bool) -> FitResult | None:
        with training_run(RunConfig(out_dir=str(tmp_path), resume=resume)) as run:
            return run.fit(model, tiny_rows(), config, identity={}, last_file="drafter.json")

    assert train(config, False) is not None
    (tmp_path / "drafter.json").touch()
    assert train(config, True) is None  # finished already
    longer = replace(config, steps=4)
    assert train(longer, True) is not None  # killed here, before the drafter is saved
    assert train(longer, True) is not None


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
    source = SmallLMDraftModel(load_small_lm(str(tmp_path), byte_tokenizer(), dtype=torch.float32))
    prompts = [random_prompt(12, seed) for seed in range(3)]
    eos = {list(autoregressive(stack, prompts[0], max_new_tokens=7))[-1].tokens[-1]}
    metrics = Decoding([*map(TextToContinue, prompts)], 20, eos)(stack, source)
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


def test_what_is_started_is_what_was_asked_for(target: Path, small: Path, corpus: DataConfig) -> None:
    settings, tokenizer = load_config(str(target)), load_tokenizer(str(target))
    asked = DrafterConfig(layers=3, hidden=32, heads=4, kv_heads=2, intermediate=48, tied=True)
    shape = drafter_config(asked, settings, tokenizer).to_dict()
    assert shape | {
        "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "tie_word_embeddings": True, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    } == shape  # fmt: skip
    path = DrafterConfig(path=str(small))
    for alpha, expected in ((None, 4), (7.0, 7)):
        run = finetuning(target, corpus, Path("out"), lora_rank=2, lora_alpha=alpha, drafter=path)
        lm: Any = start_lm(run, load_config(str(small)), tokenizer, torch.device("cpu"))
        assert (lm.peft_config["default"].r, lm.peft_config["default"].lora_alpha) == (2, expected)


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


TOKENS = torch.tensor([3, 7, 40, 41, 99, 100, 256])


def models(target: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The target whole, and as a drafter of `TOKENS` alone."""
    whole, small = (open_target(str(target)).layers(dtype=torch.float32) for _ in range(2))
    narrow(small, DraftVocabulary(TOKENS, VOCABULARY))
    return whole, small


def batch() -> dict[str, Tensor]:
    """Two rows of `TOKENS`, of whose labels some are others."""
    ids = TOKENS[torch.randint(len(TOKENS), (2, 20), generator=torch.Generator().manual_seed(1))]
    labels = ids.roll(-1, 1)
    labels[:, ::3] = 5
    zeros = torch.zeros_like(ids)
    return {"input_ids": ids, "labels": labels, "positions": torch.arange(20).expand(2, 20), "documents": zeros}


@pytest.mark.parametrize("tied", [False, True])
def test_of_texts_of_its_tokens_it_says_what_the_whole_one_does(tmp_path: Path, tied: bool) -> None:
    whole, small = (layer_stack(model) for model in models(save_target(tmp_path, tied=tied)))
    assert (small.head.weight is small.embed_tokens.weight) == tied
    assert small.head.weight.shape[0] == small.embed_tokens.weight.shape[0] == len(TOKENS) + 1
    ids, where = batch()["input_ids"][:1], torch.arange(20)[None]
    assert torch.equal(small.embed(ids, where), whole.embed(ids, where))
    other = small.embed(torch.tensor([[5, 6, VOCABULARY + 3]]), where[:, :3])[0]
    assert torch.equal(other, small.embed_tokens.weight[-1].expand(3, -1))
    hidden = torch.randn(1, 4, whole.config.hidden_size)
    logits = small.logits(hidden)
    torch.testing.assert_close(logits[..., TOKENS], whole.logits(hidden)[..., TOKENS])
    assert logits.softmax(-1)[..., TOKENS].sum(-1).allclose(torch.ones(1, 4))


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_widened_it_drafts_the_same_for_engines_with_one_vocabulary(tmp_path: Path, tied: bool) -> None:
    """It reads other tokens as before, and never finds one likeliest, loaded again from its directory too."""
    whole, small = models(save_target(tmp_path, tied=tied))
    text = torch.cat([batch()["input_ids"][0], torch.tensor([5, 6, 200, 3])])
    own = DraftVocabulary(TOKENS, VOCABULARY)
    drafted = small(own.to_draft_ids(text)[None]).logits
    widen(small, own, {})
    small.save_pretrained(tmp_path / "wide")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")(text[None]).logits
    assert served.shape[-1] == whole.config.vocab_size
    torch.testing.assert_close(served[..., TOKENS], drafted[..., : len(TOKENS)])
    assert torch.equal(served.argmax(-1), own.to_target_logits(drafted).argmax(-1))
    assert not is_narrowed(AutoConfig.from_pretrained(tmp_path / "wide"))


def test_it_samples_the_targets_ids(tmp_path: Path) -> None:
    """What the whole model would draw if it were kept to these tokens; then it is judged on them."""
    whole, small = models(save_target(tmp_path, peak=0.2))
    prefixes, numbers = [batch()["input_ids"][0, :6], batch()["input_ids"][1, :9]], torch.rand(2, 5)
    _, drawn = continue_prefixes(small, prefixes, numbers, VOCABULARY)
    assert len({*drawn.flatten().tolist()}) > 2
    for prefix, row, coins in zip(prefixes, drawn, numbers, strict=True):
        text = prefix.tolist()
        for token, coin in zip(row.tolist(), coins, strict=True):
            cumulative = whole(torch.tensor([text])).logits[0, -1, TOKENS].softmax(-1).cumsum(-1)
            assert token == TOKENS[int((cumulative <= coin).sum())]
            text.append(token)
    student = SmallLMStudent(
        small.requires_grad_(True), "kl_tv", layer_stack(whole), OnPolicy(1.0, 6, 0, frozenset())
    ).train()
    loss = student(**batch())["loss_sum"]
    loss.backward()
    assert loss > 0
    assert all(p.grad is not None for p in student.parameters())


@pytest.mark.parametrize("finished", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_trains_decodes_losslessly_and_only_drafts(tmp_path: Path, finished: bool) -> None:
    """A new one by cached distributions, greedy; adapters of a finished one on its own samples, sampled. Rows of both
    tables are all that is stored of them. Chain, tree and token graph. The report says what it covers."""
    target, out = save_target(tmp_path / "target", kv_heads=2), tmp_path / "out"
    if finished:
        shape, data = DrafterConfig(path=str(target)), write_corpus(tmp_path)
        changes: dict[str, Any] = {"objective": "acceptance", "on_policy": 0.5, "lora_rank": 2}
    else:
        shape = DrafterConfig(layers=1, hidden=32, heads=2, intermediate=48, tied=True)
        data, changes = save_responses(target, tmp_path / "responses"), {"teacher": "cached"}
    finetune_drafter(finetuning(target, data, out, drafter=shape, draft_vocabulary=24, **changes))
    tokens = load_file(out / TOKENS_FILE)["tokens"]
    assert len(tokens) == 24
    weights = load_file(out / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape[0] == 25
    assert ("lm_head.weight" in weights) == finished
    assert "cannot draft with it" in (out / "README.md").read_text()
    planned = weight_bytes(SmallLMPlugin().empty_model(str(out), load_config(str(target))), Storage(4, 64))
    assert planned == sum(tensor.nbytes for tensor in weights.values())
    methods = {
        "chain": MethodConfig("small_lm", stop=StopConfig(max_draft=3)),
        "opt_tree": MethodConfig("small_lm", StructureConfig("opt_tree", nodes=8, delta=0.0)),
        "gsd": MethodConfig("small_lm", StructureConfig("token_graph", nodes=12)),
    }
    config = EvaluateConfig(
        target=str(target), small_lm=str(out), device="cpu", max_new_tokens=12, methods=methods,
        sampling=SamplingConfig(temperature=float(finished)), out_dir=str(tmp_path / "report"),
    )  # fmt: skip
    evaluate(config, QUESTIONS[:2])
    for report in json.loads((tmp_path / "report/report.json").read_text())["reports"]:
        assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0 or finished
        assert report["draft_vocabularies"]["small_lm"]["tokens"] == 24
    refusal(r"target=.*out: a drafter over some of its target's tokens", open_target, str(out))
    save_file({"tokens": tokens + 1}, out / TOKENS_FILE)
    refusal("truncated or altered", load_small_lm, str(out), load_tokenizer(str(target)), dtype=torch.float32)
    (out / TOKENS_FILE).unlink()
    refusal(f"no {TOKENS_FILE} there", load_small_lm, str(out), load_tokenizer(str(target)), dtype=torch.float32)
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 25


def test_a_finished_one_of_some_tokens_goes_on(tmp_path: Path) -> None:
    """With a learning rate of next to nothing it stays what it was, tokens and all."""
    target = save_target(tmp_path / "target", kv_heads=2)
    data = save_responses(target, tmp_path / "responses")
    one = finetuning(target, data, tmp_path / "one", teacher="cached", draft_vocabulary=24)
    finetune_drafter(one)
    path = DrafterConfig(path=str(tmp_path / "one"))
    on = replace(one, drafter=path, draft_vocabulary=None, out_dir=str(tmp_path / "two"), fit=replace(FIT, lr=1e-12))
    finetune_drafter(on)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)
    assert (tmp_path / "one" / TOKENS_FILE).read_bytes() == (tmp_path / "two" / TOKENS_FILE).read_bytes()
    save_target(tmp_path / "padded", kv_heads=2, vocab_size=384)
    padded = replace(on, target=str(tmp_path / "padded"), teacher="online", out_dir=str(tmp_path / "for padded"))
    finetune_drafter(padded)
    config = read_config(padded.out_dir, role="small_lm")
    found = read_draft_vocabulary(padded.out_dir, None, config)
    assert found is not None
    assert found.vocabulary == 384
    with pytest.raises(UserError, match="draft_vocabulary=24: expected null, as drafter"):
        finetune_drafter(replace(on, draft_vocabulary=24, out_dir=str(tmp_path / "three")))

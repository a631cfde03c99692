"""A small LM that is made of some of the target's tokens: its rows, its losses, its samples, and the whole way."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.base.errors import UserError
from outrider.draft_models.draft_vocabulary import TOKENS_FILE, narrow, read_draft_vocabulary, widen
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.narrowed import DraftVocabulary, is_narrowed
from outrider.draft_models.targets.open_target import load_config, load_tokenizer, open_target, read_config
from outrider.inference.drafters.small_lm import PLUGIN
from outrider.inference.loading.memory_plan import Place, weight_bytes
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.train.parts.on_policy import OnPolicy, continue_prefixes
from outrider.train.recipes.small_lm import SmallLMStudent, finetune_drafter
from outrider.train.settings.drafters import DrafterConfig
from tests.inference.evaluate.evaluating import QUESTIONS, evaluate
from tests.refusals import refusal
from tests.tiny import VOCABULARY, save_target
from tests.train.jobs import FIT, finetuning, save_responses, write_corpus

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
    drafted = small(own.inward(text)[None]).logits
    widen(small, own, {})
    small.save_pretrained(tmp_path / "wide")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")(text[None]).logits
    assert served.shape[-1] == whole.config.vocab_size
    torch.testing.assert_close(served[..., TOKENS], drafted[..., : len(TOKENS)])
    assert torch.equal(served.argmax(-1), own.outward(drafted).argmax(-1))
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
    student = SmallLMStudent(small.requires_grad_(True), "kl_tv", layer_stack(whole), OnPolicy(1.0, 6, 0, None)).train()
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
    planned = weight_bytes(PLUGIN.empty(str(out), load_config(str(target))), Place(4, 64))
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

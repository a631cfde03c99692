"""Drafts of several tokens in one pass: the loss of packed rows is that of every draft by itself."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider.base.errors import UserError
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.open_target import load_config, load_tokenizer
from outrider.draft_models.targets.target import Band
from outrider.inference.drafters.small_lm import source_of
from outrider.train.parts.on_policy import OnPolicy, row_generator
from outrider.train.parts.parallel import DraftBand, Parallel
from outrider.train.recipes.small_lm import SmallLMStudent, finetune_drafter
from outrider.train.settings.drafters import DrafterConfig
from outrider.train.students.small_lm import drafter_config, parallel_of, small_lm_plan
from tests.faults import plant
from tests.tiny import VOCABULARY, open_stack, save_target
from tests.train.jobs import FIT, finetuning, require_lossless, save_responses
from tests.train.test_small_lm_student import batch, student

MASK = VOCABULARY - 1
DRAFTS = Parallel(tokens=4, keep=0.7, mask=MASK, seed=0)
FEW = torch.tensor([*range(100), MASK])


def by_itself(one: SmallLMStudent, target: Path, rows: dict[str, Tensor]) -> Tensor:
    """The sum over every supervised token and every draft from it that is kept, each by a forward of its own: the text
    of its document up to there, then masks. Its tokens are compared with what the whole target says of the text."""
    whole = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    one.lm.set_attn_implementation("eager")
    own, loss, tokens = one.stack.draft_vocabulary, torch.zeros(()), 1 if one.parallel is None else DRAFTS.tokens
    for ids, labels, documents in zip(rows["input_ids"], rows["labels"], rows["documents"], strict=True):
        numbers = row_generator(0, one.step, ids).random(len(ids))
        for document in documents.unique():
            part = (documents == document).nonzero()[:, 0]
            logits = whole(ids[part][None]).logits[0].detach()
            for place in range(len(part)):
                if labels[part[place]] == IGNORE:
                    continue
                depth = sum(numbers[part[place]] < DRAFTS.keep**j for j in range(1, tokens))
                depth = min(depth, len(part) - 1 - place)
                text = torch.cat([ids[part[: place + 1]], torch.full((depth,), MASK)])
                said = one.lm((text if own is None else own.inward(text))[None]).logits[0, place:]
                for j in range(depth + 1):
                    if labels[part[place + j]] != IGNORE:
                        loss = loss + divergence(one, said[j], logits[place + j], int(labels[part[place + j]]))
    return loss / sum(DRAFTS.keep**j for j in range(tokens))


def divergence(one: SmallLMStudent, said: Tensor, wanted: Tensor, label: int) -> Tensor:
    own = one.stack.draft_vocabulary
    if own is not None:
        said, wanted = said[: len(own.tokens)], wanted[own.tokens]
        label = own.tokens.tolist().index(label) if label in own.tokens else IGNORE
    if one.objective == "cross_entropy":
        return -said.log_softmax(-1)[label] if label != IGNORE else torch.zeros(())
    q, p = said.log_softmax(-1), wanted.log_softmax(-1)
    return (p.exp() * (p - q)).sum() if one.objective == "forward_kl" else (q.exp() * (q - p)).sum()


def gradients(one: SmallLMStudent, loss: Tensor) -> list[Tensor | None]:
    return [*torch.autograd.grad(loss, [*one.lm.parameters()], allow_unused=True)]


@pytest.mark.parametrize(
    ("architecture", "objective", "drafts", "few", "cached"),
    [
        ("llama", "forward_kl", DRAFTS, None, False),
        ("mistral", "reverse_kl", DRAFTS, None, False),  # its window is shorter than the documents
        ("qwen3", "cross_entropy", DRAFTS, FEW, False),
        ("llama", "forward_kl", DRAFTS, FEW, True),
        ("mistral", "forward_kl", None, None, False),
        ("qwen3", "cross_entropy", None, FEW, False),
    ],
)
def test_the_loss_is_that_of_every_draft_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, objective: str, drafts: Parallel | None,
    few: Tensor | None, cached: bool,
) -> None:  # fmt: skip
    """And so are the gradients, also where rows are attended to in blocks. Cached: all of what the target says."""
    target, rows = save_target(tmp_path / "target", architecture, kv_heads=2), batch(length=40)
    rows["labels"][:, -1] = 7  # where masks stand that only fill a row up
    if few is not None:
        rows["input_ids"] %= 120
    for blocks in (512, 32):
        monkeypatch.setattr(Band, "BLOCK", blocks)
        one, recorded = student(target, objective, None, drafts, few).train(), {}
        if cached:
            taught = one.teach(*(rows[name] for name in ("input_ids", "positions", "documents")))
            top = one.teacher.logits_after_norm(taught).log_softmax(-1).topk(VOCABULARY)
            recorded = {"top_ids": top.indices, "top_logprobs": top.values, "tail": torch.zeros(taught.shape[:2])}
            one._unregistered = (one.stack, None)
        loss = one(**rows, **recorded)["loss_sum"]
        found, alone = gradients(one, loss), by_itself(one, target, rows)
        torch.testing.assert_close(loss, alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found, gradients(one, alone), rtol=1e-3, atol=1e-4)


DRAWN, SEEN = (Parallel, "predict"), (DraftBand, "block")
FAULTS = {  # where, and what stands there instead
    "the next token is seen": (*SEEN, "& (keys <= last)", "& (keys <= last + 1)"),
    "other drafts are seen": (*SEEN, "keys, 1] == last", "keys, 1] <= last"),
    "later masks are seen": (*SEEN, "& (keys <= queries)", ""),
    "masks are not seen": (*SEEN, "(keys <= last) | own", "(keys <= last)"),
    "other documents are seen": (*SEEN, "& (keys >= first) ", ""),
    "windows end at the anchor": (*DRAWN, "anchors + depth - (window", "anchors - (window"),
    "drafts pass the document's end": (*DRAWN, "(ahead == documents", "(ahead >= documents"),
    "positions of the anchor": (*DRAWN, "anchors) + depth]", "anchors)]"),
    "labels of the anchor": (*DRAWN, "labels.gather(1, of)", "labels.gather(1, last)"),
    "taught what follows the anchor": (*DRAWN, "values[rows, of]", "values[rows, last]"),
    "depths dropped alike": (*DRAWN, "self.keep ** torch", "self.keep + 0 * torch"),
    "another step's drafts": (*DRAWN, "row_generator(self.seed, step, row)", "row_generator(self.seed, 0, row)"),
    "unsupervised anchors": (*DRAWN, "& (labels != IGNORE)[..., None]", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rows_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant(monkeypatch, *FAULTS[fault])
    target = save_target(tmp_path, "mistral", kv_heads=2)
    one, rows = student(target, parallel=DRAFTS).train(), batch(length=28)
    one.begin_step(3)
    assert (one(**rows)["loss_sum"] - by_itself(one, target, rows)).abs() > 1e-3


def test_a_step_draws_its_drafts_and_judging_has_none(target: Path) -> None:
    one, rows, losses = student(target, parallel=DRAFTS).train(), batch(), list[Tensor]()
    for step in (3, 4, 3):
        one.begin_step(step)
        losses.append(one(**rows)["loss_sum"])
    assert losses[0] == losses[2] != losses[1]
    every = replace(DRAFTS, keep=1.0).predict(3, one.stack, **rows)[1][:, 20:] != IGNORE
    assert every.sum(1).tolist() == [3 + 2 + 1 + 8 + 7 + 6] * 3
    assert one.eval()(**rows)["loss_sum"] == student(target).eval()(**rows)["loss_sum"]
    one.on_policy = OnPolicy(1.0, 6, 5, None)  # whose samples are drafted from too
    drafted, one.parallel = one.train()(**rows)["loss_sum"], None
    assert (drafted - one(**rows)["loss_sum"]).abs() > 1e-3


@pytest.mark.parametrize("some", [False, True])
def test_a_drafter_of_several_tokens_is_trained_and_drafts(tmp_path: Path, target: Path, some: bool) -> None:
    """With the token that stands for one to be drafted in its config, and in its draft vocabulary; as vLLM reads it."""
    data, changes = save_responses(target, tmp_path / "responses"), {"draft_vocabulary": 24} if some else {}
    fit = replace(FIT, steps=40, lr=1e-2, eval_every=40, save_every=40)
    run = finetuning(target, data, tmp_path / "out", parallel=4, teacher="cached", fit=fit, **changes)
    finetune_drafter(run)
    settings = load_config(run.out_dir, role="small_lm").to_dict()
    assert {"pard_token": MASK, "parallel_tokens": 4}.items() <= settings.items()
    assert ('"parallel_drafting": true' in (tmp_path / "out" / "README.md").read_text()) == (not some)
    small = load_small_lm(run.out_dir, load_tokenizer(run.out_dir), dtype=torch.float32)
    assert some == (small.predicted is not None)
    assert small.predicted is None or MASK in small.predicted
    model, stack = open_stack(target)
    require_lossless(source_of(small, 4), model, stack)
    again = replace(run, drafter=DrafterConfig(path=run.out_dir), out_dir=str(tmp_path / "plain"), parallel=0,
                    draft_vocabulary=None, fit=replace(fit, steps=1))  # fmt: skip
    finetune_drafter(again)
    assert not {"pard_token", "parallel_tokens"} & load_config(again.out_dir, role="small_lm").to_dict().keys()


def test_a_plan_counts_the_masks(target: Path, corpus: DataConfig) -> None:
    settings, sizes = load_config(str(target)), []
    for tokens in (0, 8):
        run = finetuning(target, corpus, Path("out"), parallel=tokens)
        held = small_lm_plan(run, settings, drafter_config(run.drafter, settings, load_tokenizer(str(target)))).held
        sizes.append(sum(one.size for one in held if one.what.startswith("activations")))
    assert 2 < sizes[1] / sizes[0] < 4


def test_the_mask_is_a_token_that_no_text_has(corpus: DataConfig) -> None:
    """Also of a tokenizer whose ids have gaps, and of one with more tokens than the target has rows."""
    run = finetuning(Path("t"), corpus, Path("o"), parallel=2)
    for vocabulary, added, rows, mask in (({"a": 0, "b": 2}, (), 4, 3), ({"a": 0, "<x>": 1, "<p>": 4}, (1, 4), 3, 1)):
        ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 4, "embedding_rows": rows}
        known: Any = SimpleNamespace(get_vocab=vocabulary.copy, added_tokens_decoder=dict.fromkeys(added), **ends)
        found = parallel_of(run, PreTrainedConfig(), known, rows)
        assert found is not None
        assert found.mask == mask


def test_what_cannot_be_is_refused(tmp_path: Path, corpus: DataConfig) -> None:
    target = save_target(tmp_path / "target", vocab_size=VOCABULARY - 1)
    for named, changes in {
        "parallel=1: expected 0, or 2 tokens or more": {"parallel": 1},
        "lora_rank=2: expected 0 with parallel": {"parallel": 2, "lora_rank": 2, "drafter": DrafterConfig(path="x")},
        "parallel=2: expected 0, as every token of .* may be text": {"parallel": 2},
    }.items():
        with pytest.raises(UserError, match=named):
            finetune_drafter(finetuning(target, corpus, tmp_path / "out", **changes))

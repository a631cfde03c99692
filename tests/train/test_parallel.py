"""The loss of packed rows is that of every document by itself, and of every draft of several tokens by itself."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider.base.errors import UserError
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.draft_vocabulary import draft_indices
from outrider.draft_models.early_exit.model import EarlyExit
from outrider.draft_models.losses import DIVERGENCES, IGNORE, linear_divergence, linear_topk_divergence
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.model_files import decoder_layers, final_norm
from outrider.draft_models.targets.open_target import load_config, load_tokenizer, open_target
from outrider.draft_models.targets.target import Band
from outrider.inference.drafters.small_lm.drafter import draft_model_of
from outrider.train.eesd import EarlyExitStudent
from outrider.train.finetune_drafter import choose_parallel, drafter_config, finetune_drafter, plan_memory
from outrider.train.parts import position_weights
from outrider.train.parts.heldout import packed_hidden
from outrider.train.parts.initial_lm import start_lm
from outrider.train.parts.on_policy import OnPolicy, row_generator
from outrider.train.parts.parallel import ONE_A_PASS, DraftBand, Parallel
from outrider.train.settings.drafters import DrafterConfig
from tests.families import save_family
from tests.faults import plant
from tests.tiny import ARCHITECTURES, LAYERS, VOCABULARY, open_stack, save_target
from tests.train.jobs import FIT, exit_student, finetuning, require_lossless, save_responses
from tests.train.test_heads import HEADS
from tests.train.test_position_weights import slot_weight
from tests.train.test_small_lm_student import batch, student

MASK = VOCABULARY - 1
DRAFTS = Parallel(tokens=4, keep=0.7, mask=MASK, seed=0)
CAT, DPACE = replace(DRAFTS, weights="cat"), replace(DRAFTS, weights="dpace")
FEW, EVERY = torch.tensor([*range(100), MASK]), torch.arange(VOCABULARY)
Say = Callable[[Tensor, int], Tensor]  # a text and a number of masks after it → logits [text + masks, K]
Both = tuple[Any, Say, list[Tensor], list[Tensor]]  # a student, its drafter by itself; the parameters of both
Rows = dict[str, Tensor]


def lm_alone(target: Path, objective: str, drafts: Parallel, few: Tensor | None, cached: bool) -> Both:
    one = student(target, objective, None, drafts, few).train()
    vars(one)["teacher"], own = None if cached else one.teacher, one.stack.draft_vocabulary

    def say(text: Tensor, masks: int) -> Tensor:
        one.lm.set_attn_implementation("eager")
        text = torch.cat([text, torch.full((masks,), MASK)])
        logits: Tensor = one.lm((text if own is None else own.to_draft_ids(text))[None]).logits[0]
        return logits if own is None else logits[:, : len(own.tokens)]

    return one, say, [*one.lm.parameters()], [*one.lm.parameters()]


def exit_alone(
    target: Path, objective: str, drafts: Parallel, few: Tensor | None, cached: bool, layer: int = 2,
    depth: int = 1, train_head: bool = True,
) -> Both:  # fmt: skip
    """Beside transformers' own model of its layers, which is fed the masks."""
    opened, tokens = open_target(str(target)), 0 if drafts is ONE_A_PASS else drafts.tokens
    shape: dict[str, Any] = {"exit_depth": depth, "train_head": train_head, "parallel": tokens, "objective": objective}
    first, last = [*range(layer)], opened.config.num_hidden_layers - 1
    model = opened.layers([*first, last] if cached or objective == "cross_entropy" else None, dtype=torch.float32)
    one = exit_student(model, layer, few, teacher="cached" if cached else "online", **shape)
    plain = opened.layers([*first, *[last] * depth], dtype=torch.float32).requires_grad_(True)
    plain.set_attn_implementation("eager")
    embed, head = plain.get_input_embeddings(), plain.get_output_embeddings()
    mask = torch.randn(opened.config.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    if drafts is not ONE_A_PASS:
        one.parallel = replace(drafts, mask=opened.config.vocab_size)
        one.drafter.mask.data.copy_(mask)

    def say(text: Tensor, masks: int) -> Tensor:
        given = torch.cat([embed(text), (embed.weight[-1] + mask).expand(masks, -1)])
        fed: dict[str, Tensor] = {"inputs_embeds": given[None]} if masks else {"input_ids": text[None]}
        logits: Tensor = plain(**fed).logits[0]
        return logits if few is None else logits[:, few]

    parts = [*decoder_layers(plain)[layer:], final_norm(plain), *([head] if train_head else [])]
    its = [mask] * (drafts is not ONE_A_PASS) + [parameter for part in parts for parameter in part.parameters()]
    return one, say, [*one.drafter.parameters()], [] if depth > 1 or plain.config.tie_word_embeddings else its


def by_itself(one: Any, say: Say, target: Path, few: Tensor | None, rows: Rows, recorded: Rows) -> Tensor:
    """The sum over every supervised token and every draft from it that is kept, each by a forward of its own: the text
    of its document up to there, then masks. Its tokens are compared with what the whole target says of the text."""
    whole = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    loss, tokens = torch.zeros(()), one.parallel.tokens
    each = zip(rows["input_ids"], rows["labels"], rows["documents"], strict=True)
    for row, (ids, labels, documents) in enumerate(each):
        numbers = row_generator(0, one.step, ids).random(len(ids))
        for document in documents.unique():
            part = (documents == document).nonzero()[:, 0]
            logits, own = whole(ids[part][None]).logits[0].detach(), say(ids[part], 0)
            for place in range(len(part)):
                if labels[part[place]] == IGNORE:
                    continue
                depth = sum(numbers[part[place]] < DRAFTS.keep**j for j in range(1, tokens))
                depth = min(depth, len(part) - 1 - place)
                said = say(ids[part[: place + 1]], depth)[place:] if depth else own[place:]
                columns = part[place : place + depth + 1]
                known = {name: value[row, columns] for name, value in recorded.items()}
                p, q = label_probabilities(labels[columns], logits[place:], said, few, known)
                for j, at in enumerate(columns):
                    top = {name: value[j][None] for name, value in known.items()}
                    term = divergence(one, few, said[j][None], logits[place + j][None], labels[at][None], top)
                    loss = loss + slot_weight(one.parallel.weights, j, p, q) * term
    return loss / sum(DRAFTS.keep**j for j in range(tokens))


def label_probabilities(
    labels: Tensor, logits: Tensor, said: Tensor, few: Tensor | None, known: Rows
) -> tuple[list[float], list[float]]:
    """Of a draft's labels by the target, or what is known of it, and by the drafter, up to the first IGNORE."""
    p, q = list[float](), list[float]()
    for slot, label in enumerate(labels.tolist()):
        if label == IGNORE:
            break
        p.append(logits[slot].softmax(-1)[label].item())
        if known and label not in known["top_ids"][slot]:
            p[-1] = min(known["tail"][slot].item(), known["top_logprobs"][slot].exp().min().item())
        index = draft_indices(labels[slot], few, logits.shape[-1]).item()
        q.append(0.0 if index == IGNORE else said[slot].softmax(-1)[index].item())
    return p, q


def divergence(one: Any, few: Tensor | None, said: Tensor, wanted: Tensor, label: Tensor, known: Rows) -> Tensor:
    """Of logits [1, K] from the target's [1, V], or from those of its tokens that are known; 0 without a label."""
    every, vocabulary = (torch.eye(logits.shape[-1]) for logits in (said, wanted))
    if one.objective == "cross_entropy":
        return F.cross_entropy(said, draft_indices(label, few, len(vocabulary)), ignore_index=IGNORE, reduction="sum")
    if known:
        top = (draft_indices(known["top_ids"], few, len(vocabulary)), known["top_logprobs"], known["tail"])
        return linear_topk_divergence(said, every, *top, label, one.objective)
    return linear_divergence(said, every, wanted, vocabulary, label, one.objective, tokens=few)


def require_alone(made: Both, target: Path, few: Tensor | None, rows: Rows, recorded: Rows) -> None:
    """The losses are the same, and the gradients."""
    one, say, own, its = made
    loss, expected = one(**rows, **recorded)["loss_sum"], by_itself(one, say, target, few, rows, recorded)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(loss, own, allow_unused=True)
    wanted = torch.autograd.grad(expected, its, allow_unused=True) if its else found
    assert its or all(gradient.abs().max() > 0 for gradient in found)
    assert [mine is None for mine in found] == [other is None for other in wanted]
    for mine, other in zip(found, wanted, strict=True):
        fits = mine is None or mine.shape == other.shape
        torch.testing.assert_close(mine, other if fits else other[few], rtol=1e-3, atol=1e-4)


DRAFTED = [
    ("llama", "forward_kl", DRAFTS, None, False),
    ("mistral", "reverse_kl", DRAFTS, None, False),  # its window is shorter than the documents
    ("qwen3", "cross_entropy", DRAFTS, FEW, False),
    ("llama", "forward_kl", DRAFTS, FEW, True),
    ("llama", "forward_kl", CAT, FEW, True),
    ("mistral", "forward_kl", CAT, None, False),
    ("qwen3", "cross_entropy", DPACE, FEW, False),
    ("mistral", "forward_kl", ONE_A_PASS, None, False),
    ("qwen3", "cross_entropy", ONE_A_PASS, FEW, False),
]
CASES: list[tuple[Any, ...]] = [
    *((alone, *case) for alone in (lm_alone, exit_alone) for case in DRAFTED),
    *((alone, "llama", kind, ONE_A_PASS, few, cached)
      for alone, few in ((lm_alone, FEW), (exit_alone, None)) for kind in DIVERGENCES for cached in (False, True)),
    *((exit_alone, "llama", kind, ONE_A_PASS, EVERY, False) for kind in ("cross_entropy", "forward_kl", "acceptance")),
    *((exit_alone, name, "cross_entropy", ONE_A_PASS, None, False, layer, depth)
      for name in ARCHITECTURES for layer, depth in ((1, 1), (LAYERS - 1, 1), (1, 2))),
    *((exit_alone, name, kind, ONE_A_PASS, None, False, 2, 1, own)
      for name in HEADS for kind in ("cross_entropy", "forward_kl") for own in (False, True)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_that_of_every_draft_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[Any, ...]
) -> None:
    """And so are the gradients, also where rows are attended to in blocks. Cached: the most likely of each token."""
    alone, architecture, _, drafts, few, cached, *_ = case
    family, changes = HEADS.get(architecture, ("", {}))
    target = save_family(tmp_path, family, **changes) if family else save_target(tmp_path, architecture, kv_heads=2)
    rows, recorded = batch(2, 32), Rows()
    rows["labels"][1:, -1] = 7  # where masks stand that only fill a row up; the other row is padded
    rows["documents"], rows["labels"][0, -5:] = rows["documents"].clone(), IGNORE
    rows["documents"][0, -4:] = -1
    if few is not None:
        rows["input_ids"] %= 120
    if cached:
        stack = open_stack(target)[1]
        taught = packed_hidden(stack, *(rows[name] for name in ("input_ids", "positions", "documents")))
        top = stack.logits_after_norm(taught).log_softmax(-1).topk(5)
        recorded = {"top_ids": top.indices, "top_logprobs": top.values, "tail": 1 - top.values.exp().sum(-1)}
    for blocks in (512, 32) if drafts is DRAFTS or drafts is CAT else (512,):
        monkeypatch.setattr(Band, "BLOCK", blocks)
        require_alone(alone(target, *case[2:]), target, few, rows, recorded)


ROWS, DRAWN, SEEN = (Parallel, "append_masks"), (Parallel, "_draw_masks"), (DraftBand, "block")
BAND, HIDDEN = (Parallel, "_draft_band"), (EarlyExitStudent, "hidden")
FAULTS = {  # where, and what stands there instead
    "the next token is seen": (*SEEN, "& (keys <= anchors)", "& (keys <= anchors + 1)"),
    "other drafts are seen": (*SEEN, "keys, 1] == anchors", "keys, 1] <= anchors"),
    "later masks are seen": (*SEEN, "& (keys <= queries)", ""),
    "masks are not seen": (*SEEN, "(keys <= anchors) | same_draft", "(keys <= anchors)"),
    "other documents are seen": (*SEEN, "& (keys >= starts) ", ""),
    "windows end at the anchor": (*BAND, "anchors + depths - (window", "anchors - (window"),
    "drafts pass the document's end": (*DRAWN, "later_documents == documents", "later_documents >= documents"),
    "positions of the anchor": (*ROWS, "anchors) + depths]", "anchors)]"),
    "labels of the anchor": (*ROWS, "labels.gather(1, predicted_columns)", "labels.gather(1, last_seen)"),
    "taught what follows the anchor": (*ROWS, "values[row_index, predicted_columns]", "values[row_index, last_seen]"),
    "depths dropped alike": (*DRAWN, "step, input_ids)[..., 1:]", "step, input_ids)[..., 1:2]"),
    "another step's drafts": (*DRAWN, "self.seed, step, input_ids", "self.seed, 0, input_ids"),
    "unsupervised anchors": (*DRAWN, "& (labels != IGNORE)[..., None]", ""),
    "masks without their vector": (EarlyExit, "embed", "* self.mask", "* 0 * self.mask"),
    "an exit's own positions": (*HIDDEN, "stack.rotary(all_positions)", "stack.rotary(all_positions.clamp(max=9))"),
    "taught by other texts": (*HIDDEN, "trunk[:, :text_length].detach()", "trunk[:, :text_length].detach().flip(0)"),
    "no gradient in frozen layers": (*HIDDEN, "set_grad_enabled(needs_grad)", "set_grad_enabled(False)"),
    "weighed by its own token": (position_weights, "cat_weights", "[..., :-1], (1, 0)", "[..., 1:], (0, 1)"),
    "weighed by other drafts": (position_weights, "cat_weights", "flatten(0, 1)", "flatten(0, 1).roll(1, 0)"),
    "each prediction counts as a token": (EarlyExitStudent, "forward", "/ draft_rows.expected_predictions", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rows_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant(monkeypatch, *FAULTS[fault])
    target, rows = save_target(tmp_path, "mistral", kv_heads=2), batch(length=28)
    alone = lm_alone if FAULTS[fault][:2] in (ROWS, DRAWN, BAND, SEEN) else exit_alone
    made = alone(target, "forward_kl", CAT if "weighed" in fault else DRAFTS, None, False)
    made[0].begin_step(3)
    with pytest.raises((AssertionError, RuntimeError)):
        require_alone(made, target, None, rows, {})


def test_a_step_draws_its_drafts_and_judging_has_none(target: Path) -> None:
    one, rows, losses = student(target, parallel=DRAFTS).train(), batch(), list[Tensor]()
    for step in (3, 4, 3):
        one.begin_step(step)
        losses.append(one(**rows)["loss_sum"])
    assert losses[0] == losses[2] != losses[1]
    every = replace(DRAFTS, keep=1.0).append_masks(3, one.stack, **rows).labels[:, 20:] != IGNORE
    assert every.sum(1).tolist() == [3 + 2 + 1 + 8 + 7 + 6] * 3
    assert one.eval()(**rows)["loss_sum"] == student(target).eval()(**rows)["loss_sum"]
    one.on_policy = OnPolicy(1.0, 6, 5, frozenset())  # whose samples are drafted from too
    drafted, one.parallel = one.train()(**rows)["loss_sum"], ONE_A_PASS
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
    require_lossless(draft_model_of(small), model, stack)
    again = replace(run, drafter=DrafterConfig(path=run.out_dir), out_dir=str(tmp_path / "plain"), parallel=0,
                    draft_vocabulary=None, fit=replace(fit, steps=1))  # fmt: skip
    finetune_drafter(again)
    assert not {"pard_token", "parallel_tokens"} & load_config(again.out_dir, role="small_lm").to_dict().keys()
    for odd in ({"pard_token": "x"}, {"parallel_tokens": 0}, {"pard_token": MASK + 1 + 10**10 * some}):
        (tmp_path / "out" / "config.json").write_text(json.dumps(settings | odd))
        with pytest.raises(UserError, match=f"small_lm=.*: {next(iter(odd))}="):
            load_small_lm(run.out_dir, load_tokenizer(run.out_dir), dtype=torch.float32)


def test_a_finished_drafters_mask_begins_as_the_mean_of_all_embeddings(small: Path, corpus: DataConfig) -> None:
    run, shape = finetuning(small, corpus, Path("out"), drafter=DrafterConfig(path=str(small))), load_config(str(small))
    masked, chain = (
        start_lm(run, shape, load_tokenizer(str(small)), torch.device("cpu"), parallel=parallel).get_input_embeddings()
        for parallel in (DRAFTS, ONE_A_PASS)
    )
    torch.testing.assert_close(masked.weight[MASK], chain.weight.mean(0))
    assert (masked.weight != chain.weight).any(1).nonzero().tolist() == [[MASK]]


def test_a_plan_counts_the_masks(target: Path, corpus: DataConfig) -> None:
    settings, sizes = load_config(str(target)), []
    for tokens in (0, 8):
        run = finetuning(target, corpus, Path("out"), parallel=tokens)
        held = plan_memory(run, settings, drafter_config(run.drafter, settings, load_tokenizer(str(target)))).parts
        sizes.append(sum(one.size for one in held if one.purpose.startswith("activations")))
    assert 2 < sizes[1] / sizes[0] < 4


def test_the_mask_is_a_token_that_no_text_has(corpus: DataConfig) -> None:
    """Also of ids with gaps, and of more tokens than the target has rows; a template's are in texts."""
    run = finetuning(Path("t"), corpus, Path("o"), parallel=2)
    for vocabulary, rows, mask in (({"a": 0, "b": 2}, 4, 3), ({"a": 0, "<x>": 1, "<user>": 2, "<p>": 4}, 3, 1)):
        ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 4, "embedding_rows": rows}
        added = {one: SimpleNamespace(content=name) for name, one in vocabulary.items() if name[0] == "<"}
        ends |= {"added_tokens_decoder": added, "chat_template": "<user>{{ messages }}"}
        known: Any = SimpleNamespace(get_vocab=vocabulary.copy, **ends)
        found = choose_parallel(run, PreTrainedConfig(vocab_size=rows), known, rows)
        assert found.mask == mask

"""A block drafter with each known misreading of such files: the doctor names every one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.base.errors import UserError
from outrider.draft_models.dflash.checkpoint import open_drafter, save_drafter
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.dflash.reading import BlockReading
from outrider.draft_models.heads.files import DRAFT_TOKENS
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.inference.doctor.examine import compare_variants, score_variants
from outrider.inference.doctor.examinees import EXAMINERS, draft_by_block
from outrider.inference.doctor.scores import Findings, describe_findings, join_scores, refuse_reading, score_logits
from outrider.inference.drafters.dflash.drafter import DFlashPlugin
from tests.fitted_heads import random_weights
from tests.inference.doctor.fitted import ROPE, TAPS, TOKENS, Clinic, Edit, as_another_trainer, learn_drafts

PLAIN = BlockReading(
    taps=TAPS, target_hidden=64, hidden=64, intermediate=96, layers=1, heads=4, key_heads=2, head_dim=16, epsilon=1e-5,
    activation="silu", vocabulary=260, draft_vocabulary=len(TOKENS), rope=ROPE, max_positions=256, windows=(None,),
    head_norms=True, block=8, mask_token=2, sample_from_anchor=False, causal=False,
)  # fmt: skip
# DSpark, whose rows see no later ones and rotate neighbours.
MARKOV = replace(PLAIN, block=4, causal=True, neox=False, sample_from_anchor=True, markov_rank=4, confidence="markov")


def trained(clinic: Clinic, reading: BlockReading, steps: int = 45) -> DFlash:
    """A drafter that predicts the answers."""
    weights = random_weights(DFlash, reading, torch.float32)
    weights["layers.0.self_attn.q_norm.weight"] *= 2  # so that positions matter
    drafter = DFlash(reading, all_tokens=False).with_weights({**weights, DRAFT_TOKENS: torch.tensor(TOKENS)})
    drafter.use_embedding(clinic.stack.embed_tokens.weight)
    draft: Callable[..., Tensor] = draft_by_block.__wrapped__  # type: ignore[attr-defined]  # without inference mode
    learn_drafts(partial(draft, drafter), [*drafter.parameters()], clinic.texts, steps)
    return drafter.requires_grad_(False)


class Ward(NamedTuple):
    clinic: Clinic
    drafters: dict[str, DFlash]


@pytest.fixture(scope="module")
def ward(clinic: Clinic) -> Ward:
    return Ward(clinic, {"dflash": trained(clinic, PLAIN), "dspark": trained(clinic, MARKOV)})


def write(path: Path, ward: Ward, name: str, *edits: Edit) -> str:
    save_drafter(path, ward.drafters[name], ward.clinic.stack.config)
    return as_another_trainer(path, *edits)


def examined(ward: Ward, where: str) -> Findings:
    clinic = ward.clinic
    drafter = open_drafter(where, clinic.target.config).load(torch.float32)
    DFlashPlugin().prepare(drafter, clinic.stack)
    examinee = EXAMINERS["dflash"](drafter, where, clinic.target, clinic.stack, ReadingChanges())
    return compare_variants(examinee, score_variants(clinic.texts, {"dflash": examinee})["dflash"])


def top(**changes: Any) -> Edit:
    return lambda config, weights: config.update(changes)


def outputs(layers: list[int]) -> Edit:
    def edit(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        config["target_layer_ids"] = config["dflash_config"]["target_layer_ids"] = layers

    return edit


def ids(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["d2t"] = torch.tensor(TOKENS)
    del weights["t2d"]  # which would reveal it at once


def embedding(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["embed_tokens.weight"] = torch.randn(260, 64, generator=torch.Generator().manual_seed(3))


def lost_causality(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    config["dflash_config"]["causal"] = None


MISREAD: dict[str, tuple[str, Edit, str]] = {  # whose; with the option that reads it rightly
    "taps one too low": ("dflash", outputs([-1, 0, 1]), "reading.taps=[1,2,3]"),
    "taps one too far": ("dspark", outputs([1, 2, 3]), "reading.taps=[1,2,3]"),
    "causal, and was not": ("dflash", top(is_causal=True), "reading.causal=false"),
    "not causal, and was": ("dspark", lost_causality, "reading.causal=true"),
    "a slot too early": ("dflash", top(sample_from_anchor=True), "reading.sample_from_anchor=false"),
    "a slot too late": ("dspark", top(sample_from_anchor=False), "reading.sample_from_anchor=true"),
    "rotates neighbours": ("dflash", top(is_neox_style=False), "reading.neox=true"),
    "rotates halves": ("dspark", top(is_neox_style=True), "reading.neox=false"),
    "another base": ("dflash", top(rope_theta=10000.0), "reading.rope=target"),
    "stretched": ("dspark", top(rope_scaling={"rope_type": "linear", "factor": 8.0}), "reading.rope=target"),
    "d2t of ids": ("dspark", ids, "reading.draft_ids=index"),
    "a random embedding": ("dflash", embedding, "reading.own_embedding=false"),
}


@pytest.mark.parametrize("fault", MISREAD)
def test_a_reading_that_is_better_is_named_and_can_be_had(ward: Ward, tmp_path: Path, fault: str) -> None:
    name, edit, option = MISREAD[fault]
    where = write(tmp_path / "drafter", ward, name, edit)
    found = examined(ward, where)
    assert found.better is not None
    assert found.better.name == option
    with pytest.raises(UserError, match=r"doctor=false to take it as declared"):
        refuse_reading("dflash", where, found)
    key, value = option.removeprefix("reading.").split("=")
    read: Any = {"[1,2,3]": TAPS, "true": True, "false": False}.get(value, value)
    cured = open_drafter(where, ward.clinic.target.config, ReadingChanges(**{key: read})).load(torch.float32)
    DFlashPlugin().prepare(cured, ward.clinic.stack)
    score = partial(map, score_logits, [draft_by_block(cured, text) for text in ward.clinic.texts], ward.clinic.texts)
    scores = join_scores([*score(range(len(ward.clinic.texts)))])
    assert (*scores.agrees.mean(1).tolist(),) == found.better.agree
    assert scores.agreement > 0.9 > found.ways[0].agreement


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_drafter_that_is_read_rightly_is_left_alone(ward: Ward, tmp_path: Path, name: str) -> None:
    found = examined(ward, write(tmp_path / "drafter", ward, name))
    assert found.better is None
    assert len(found.ways) > 7
    assert "3rd token" in "\n".join(describe_findings("dflash", found))
    assert len(found.ways[0].agree) == (4 if name == "dflash" else MARKOV.block - 1)


def test_a_confidence_head_that_was_left_out_is_named(ward: Ward, tmp_path: Path) -> None:
    def lose(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        del weights["confidence_head.proj.weight"], weights["confidence_head.proj.bias"]

    found = examined(ward, write(tmp_path / "drafter", ward, "dspark", lose))
    assert [fact.name for fact in found.facts if fact.suspect] == ["confidence head"]

"""An EAGLE-3 head with each known mistake of such heads: the doctor names every one that changes drafts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.base.errors import UserError
from outrider.draft_models.eagle3.checkpoint import open_head
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.inference.doctor.examine import compare_variants, score_variants
from outrider.inference.doctor.examinees import Examinee, draft_by_head, examine_head
from outrider.inference.doctor.scores import (
    Findings,
    ReadingScores,
    describe_findings,
    join_scores,
    refuse_reading,
    score_logits,
)
from outrider.inference.drafters.eagle3.drafter import Eagle3Plugin
from tests.fitted_heads import hidden_of
from tests.inference.doctor.fitted import TAPS, TOKENS, Clinic, write


def examinee_in(clinic: Clinic, where: str) -> Examinee:
    head = open_head(where, clinic.target.config).load(torch.float32)
    Eagle3Plugin().prepare(head, clinic.stack)
    return examine_head(head, where, clinic.target, clinic.stack, ReadingChanges())


def examined(clinic: Clinic, where: str) -> Findings:
    examinee = examinee_in(clinic, where)
    return compare_variants(examinee, score_variants(clinic.texts, {"eagle3": examinee})["eagle3"])


def shown(found: Findings) -> str:
    return "\n".join(describe_findings("eagle3", found))


Config, Weights = dict[str, Any], dict[str, Tensor]


def layer(**changes: Any) -> Callable[[Config, Weights], None]:
    return lambda config, weights: config["transformer_layer_config"].update(changes)


def top(**changes: Any) -> Callable[[Config, Weights], None]:
    return lambda config, weights: config.update(changes)


def random_rows(name: str, rows: int) -> Callable[[Config, Weights], None]:
    made = torch.randn(rows, 64, generator=torch.Generator().manual_seed(3))
    return lambda config, weights: weights.update({name: made.clone()})


def maps(d2t: Tensor) -> Callable[[Config, Weights], None]:
    def edit(config: Config, weights: Weights) -> None:
        weights["d2t"] = d2t.clone()
        del weights["t2d"]  # which would reveal it at once

    return edit


def lost_norms(config: Config, weights: Weights) -> None:
    config["fc_norm"] = False
    for place in range(len(TAPS)):
        del weights[f"fc_norm.{place}.weight"]


COUNT = len(TOKENS)
MISREAD: dict[str, tuple[Callable[[Config, Weights], None], str]] = {  # with the option that reads it rightly
    "taps as outputs": (top(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), "reading.taps=[1,2,3]"),
    "taps one too far": (top(eagle_aux_hidden_state_layer_ids=[2, 3, 4]), "reading.taps=[1,2,3]"),
    "a head overwritten": (random_rows("lm_head.weight", COUNT), "reading.own_head=false"),
    "a random embedding": (random_rows("embed_tokens.weight", 260), "reading.own_embedding=false"),
    "d2t of ids": (maps(torch.tensor(TOKENS)), "reading.draft_ids=index"),
    "another residual": (top(norm_before_residual=False), "reading.norm_before_residual=true"),
    "output not normed": (top(norm_output=False), "reading.norm_output=true"),
    "taps not normed": (lost_norms, "reading.tap_norms=true"),
    "another base": (layer(rope_theta=10000.0), "reading.rope=target"),
    "half rotated": (layer(partial_rotary_factor=0.5), "reading.rope=target"),
    "stretched": (layer(rope_scaling={"rope_type": "linear", "factor": 8.0}), "reading.rope=target"),
}

OF_THE_OTHER = {"a head overwritten", "another residual"}


@pytest.mark.parametrize("fault", MISREAD)
def test_a_reading_that_is_better_is_named_and_can_be_had(clinic: Clinic, tmp_path: Path, fault: str) -> None:
    edit, option = MISREAD[fault]
    where = write(tmp_path / "head", clinic.other if fault in OF_THE_OTHER else clinic.head, clinic.stack, edit)
    found = examined(clinic, where)
    assert found.better is not None
    assert found.better.name == option
    assert f"{found.better.name} is better: {found.better.meaning}" in shown(found)
    with pytest.raises(UserError, match=r"doctor=false to take it as declared") as refused:
        refuse_reading("eagle3", where, found)
    assert f"Give {option} to read it so" in str(refused.value)
    key, value = option.removeprefix("reading.").split("=")
    read: Any = {"[1,2,3]": TAPS, "true": True, "false": False}.get(value, value)
    changes = ReadingChanges(**{key: read})
    cured = open_head(where, clinic.target.config, changes=changes).load(torch.float32)
    Eagle3Plugin().prepare(cured, clinic.stack)
    scores = join_scores(
        [score_logits(draft_by_head(cured, text), text, number) for number, text in enumerate(clinic.texts)]
    )
    assert (*scores.agrees.mean(1).tolist(),) == found.better.agree
    assert scores.agreement > 0.9 > found.ways[0].agreement


def test_a_head_that_is_read_rightly_is_left_alone(clinic: Clinic, tmp_path: Path) -> None:
    """Although other readings are equally good: those of tensors that its file copies from the target."""
    found = examined(clinic, write(tmp_path / "head", clinic.head, clinic.stack))
    assert found.better is None
    assert found.ways[0].agreement > 0.9
    assert len(found.ways) > 10
    refuse_reading("eagle3", "somewhere", found)


def test_a_vocabulary_map_that_was_never_stored_is_named(clinic: Clinic, tmp_path: Path) -> None:
    """Its tokens are the first ones; no option has the right map."""
    where = write(tmp_path / "head", clinic.head, clinic.stack, maps(torch.zeros(COUNT, dtype=torch.long)))
    found = examined(clinic, where)
    assert "! d2t: all zero" in shown(found)
    assert "it seldom agrees" in shown(found)
    refuse_reading("eagle3", where, found)


def test_only_boundaries_that_are_read_are_recorded(clinic: Clinic, tmp_path: Path) -> None:
    """Of a long text only at the boundaries of the declared reading."""
    examinee = examinee_in(clinic, write(tmp_path / "head", clinic.head, clinic.stack))
    assert {tap for variant in examinee.variants for tap in variant.boundaries} == {0, *TAPS, TAPS[-1] + 1}
    assert examinee.variants[0].boundaries == TAPS


def test_constant_positions_in_training_are_found(clinic: Clinic, tmp_path: Path) -> None:
    """This runtime cannot draft that way, so the head is reported and not refused."""
    where = write(tmp_path / "head", clinic.other, clinic.stack)
    found = examined(clinic, where)
    assert found.better is not None
    assert found.better.name == "drafted positions stand still"
    assert "train it again" in shown(found)
    refuse_reading("eagle3", where, found)


@pytest.mark.parametrize("window", [None, 6])
def test_drafts_along_a_text_equal_those_of_decoding(clinic: Clinic, window: int | None) -> None:
    """First and second token at every position, in a few passes over the whole text."""
    text, head = clinic.texts[0], Eagle3.of(replace(clinic.head.reading, windows=(window,)), clinic.head.state_dict())
    head.use_embedding(clinic.stack.embed_tokens.weight)
    first, second = draft_by_head(head, text)
    tokens = text.tokens.tolist()
    for place in (text.start, text.start + 7, len(tokens) - 1):
        number = place - text.start
        # The drafter gets the text, its last token as the root, and then the next token of the text.
        [alone] = hidden_of(clinic.stack, head, tokens[: place - 1], tokens[place - 1 : place])
        torch.testing.assert_close(first[number], head.logits(alone), rtol=1e-4, atol=1e-4)
        _, after = hidden_of(clinic.stack, head, tokens[: place - 2], tokens[place - 2 : place])
        torch.testing.assert_close(second[number], head.logits(after), rtol=1e-4, atol=1e-4)


def test_a_reading_to_be_had_is_not_hidden_by_a_better_one_that_is_not() -> None:
    """The best reading may not be available by an option; then the best of the others is named."""
    row = ReadingScores("as declared", "", "m", 0.3, (0.3, 0.2), (1.0, 1.0), 1e-9, is_better=False)
    still = replace(row, name="drafted positions stand still", agreement=0.8, is_better=True)
    later = replace(row, name="reading.taps=[2,5,8]", agreement=0.6, is_better=True, option="reading.taps=[2,5,8]")
    refuse_reading("eagle3", "there", Findings(9, 1, (row, still), still))
    with pytest.raises(UserError, match=r"Give reading\.taps=\[2,5,8\]"):
        refuse_reading("eagle3", "there", Findings(9, 1, (row, still, later), still))

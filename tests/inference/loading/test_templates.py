"""Chat prompts are rendered as the conversations were that a drafter was trained on, or the user is told."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.base.errors import UserError
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.prompts import Prompt
from outrider.data_prep.text.settings import DataConfig, MixPart
from outrider.draft_models.targets.settings import EAGLE3, EARLY_EXIT, SMALL_LM, TARGET
from outrider.inference.loading.chat_templates import chat_template, templates_of
from outrider.inference.loading.target_setup import find_setup
from outrider.inference.measure.prepared import render
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig
from tests.refusals import refusal
from tests.tiny import byte_tokenizer

KIND_OF = {EARLY_EXIT: "early_exit", SMALL_LM: "small_lm", EAGLE3: "eagle3"}
RECORDS = {EARLY_EXIT: "drafter.json", SMALL_LM: "finetune_drafter.json", EAGLE3: "eagle3.json"}
QUESTION, CODE = Prompt("1", "chat", ("why?",), True), Prompt("2", "code", ("def f(",), False)
TALK = DataConfig(source="local", path="chat.jsonl", template="vicuna")
OWN = DataConfig(source="local", path="chat.jsonl")
CODE_ONLY = DataConfig(source="python_stdlib")


def trained(models: Path, drafter: str, data: DataConfig | None) -> str:
    """The directory of a drafter that has such data on record, as its training leaves it."""
    path = models / drafter / RECORDS[drafter]
    settings = {} if data is None else {"data": json.loads(json.dumps(data.decisions()))}
    if drafter == EARLY_EXIT:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"training": settings}))
    else:
        path.write_text(json.dumps({"target": "t", "settings": settings}))
    return str(path.parent)


@pytest.fixture
def models(tiny_models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models, tmp_path / "models"))


def with_template(models: Path) -> None:
    byte_tokenizer("{% for m in messages %}<{{ m.content }}>{% endfor %}").save_pretrained(models / TARGET)


def rendered(models: Path, prompt: Prompt, template: Any = "auto", **drafters: str) -> list[int]:
    kinds = {"checkpoint": "early_exit"}
    methods = {key: MethodConfig(kinds.get(key, key)) for key in drafters} or {"m": MethodConfig("prompt_lookup")}
    config = EvaluateConfig(target=str(models / TARGET), methods=methods, template=template, device="cpu", **drafters)
    return render(find_setup(config), prompt, prompt.turns)


@pytest.mark.parametrize("drafter", KIND_OF)
def test_the_template_of_the_training_renders(models: Path, drafter: str) -> None:
    option = str(KINDS[KIND_OF[drafter]].option)
    given = {option: trained(models, drafter, TALK)}
    vicuna = render_prompt(QUESTION.turns, byte_tokenizer(), "vicuna")
    assert rendered(models, QUESTION, **given) == rendered(models, QUESTION, "vicuna", **given) == vicuna
    with pytest.raises(UserError, match=rf"^template=tokenizer: expected vicuna, .*{KIND_OF[drafter]} drafter"):
        rendered(models, QUESTION, "tokenizer", **given)
    bare = render_prompt(QUESTION.turns, byte_tokenizer(), "none")
    assert rendered(models, QUESTION, "none", **given) == bare != vicuna
    assert rendered(models, CODE, "tokenizer", **given) == render_prompt(CODE.turns, byte_tokenizer(), "none")
    for data in (None, CODE_ONLY, OWN):  # the last has nothing to say: without a template there was no conversation
        given = {option: trained(models, drafter, data)}
        assert rendered(models, QUESTION, "vicuna", **given) == vicuna
        refusal(r"has no chat template, .* template=vicuna, .*template=none", rendered, models, QUESTION, **given)


def test_the_targets_own_template_is_the_default(models: Path) -> None:
    with_template(models)
    own = rendered(models, QUESTION)
    assert byte_tokenizer().decode(own) == "<why?>"
    small_lm = trained(models, SMALL_LM, OWN)
    assert rendered(models, QUESTION, small_lm=small_lm) == own
    refusal(r"^template=vicuna: expected tokenizer", rendered, models, QUESTION, "vicuna", small_lm=small_lm)
    with pytest.raises(UserError, match=r"^template=auto: .* eagle3 by vicuna.*; give template="):
        rendered(models, QUESTION, small_lm=small_lm, eagle3=trained(models, EAGLE3, TALK))


def test_what_a_record_says() -> None:
    plain, own = byte_tokenizer(), byte_tokenizer("{{ messages }}")
    parts = {"a": MixPart(source="local", path="a", template="vicuna"), "b": MixPart(source="local", path="b")}
    mixed = DataConfig(source="mix", mix=parts)
    for data, tokenizer, expected in (
        (TALK, plain, {"vicuna"}), (OWN, plain, set()), (OWN, own, {"tokenizer"}), (CODE_ONLY, own, set()),
        (mixed, own, {"tokenizer", "vicuna"}), (mixed, plain, {"vicuna"}),
        (DataConfig(source="local", path="a", layout="text", template="vicuna"), own, set()),
    ):  # fmt: skip
        assert templates_of(data.decisions(), tokenizer) == expected
    for nothing in (None, {}, {"template": "vicuna", "source": "of another version"}):
        assert templates_of(nothing, own) == frozenset()
    both = {"small_lm": templates_of(mixed.decisions(), own)}
    assert [chat_template(asked, both) for asked in ("vicuna", "tokenizer", "none")] == ["vicuna", "tokenizer", "none"]
    refusal(r"template=auto: .*tokenizer and vicuna; give template=", chat_template, "auto", both)


def test_conversations_without_a_template_end_before_they_load(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text needs none."""
    target = str(models / TARGET)
    monkeypatch.setattr("outrider.api.decoder.load_stack", None)
    with pytest.raises(UserError, match=r"has no chat template, .* template=vicuna, .*template=none"):
        outrider.load(target, device="cpu", conversations=True)
    for given in ({"conversations": True, "template": "vicuna"}, {}):
        with pytest.raises(TypeError):  # as the weights are about to be loaded
            outrider.load(target, device="cpu", **given)

"""Every command renders chat as transformers does with the same arguments, at one time of the whole run."""

import json
import math
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

import outrider
from outrider.base import processes
from outrider.base.errors import UserError
from outrider.base.processes import join_processes, only_run_of
from outrider.data_prep.settings import PromptsConfig
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig, MixPart
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.vocabulary import bind_arguments, clock_of
from outrider.inference.audit import answers
from outrider.inference.batch import generate, own_prompts
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.settings.tools import AuditConfig
from outrider.train.parts.recorded_answers import require_answers_of
from tests.tiny import byte_tokenizer, save_target

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
EMPTY = "{% if thinking is defined and thinking is false %}<think></think>{% endif %}"
THINKS = f"""  {{%- if style is defined %}}{{{{ style }}}}
{{% endif %}}
{{% for m in messages %}}<{{{{ m.role }}}}>{{% if m.role == 'assistant' %}}{EMPTY}{{% endif %}}{{{{ m.content }}}}</s>\
{{% endfor %}}{{% if add_generation_prompt %}}<assistant>{EMPTY}{{% endif %}}"""
MACRO = (
    "{% macro m() %}{{ bos_token }}{{ thinking }}{% endmacro %}\n{% generation %}{{ m() }}{% endgeneration %}" + TURN
)
BRANCH = "\n  {% if not date is defined %}{% set date = 'none' %}{% endif %}{{ date }}{% set own = 1 %}{{ own }}" + TURN
LOOP = "{% for m in messages %}{% if skip %}{% continue %}{% endif %}{{ m.content }}{{ opts | tojson }}{% endfor %}"
ODD = "Ä '\"\\n\n\t{{ x }} %} -%} {# 😀 \x00"
CASES: list[tuple[str, dict[str, object]]] = [
    (THINKS, {"thinking": False}), (THINKS, {"thinking": True, "style": ODD}), (THINKS, {"style": "\n"}),
    (MACRO, {"thinking": None, "bos_token": "B"}), (BRANCH, {"date": 1e-07}), (BRANCH, {"date": ""}),
    (LOOP, {"opts": {"a": [1, -2.5, None, True, {"b'": ODD}], "c": {}}, "skip": False}), (LOOP, {"skip": 1}),
]  # fmt: skip
CLOCKS = (
    "{{ strftime_now('%d %b %Y') }}", "{{ strftime_now(format='%-d.%m. %H:%M:%S.%f 100%% %%d') }}",
    "{% set form = '%Y-%j' %}{{ strftime_now(form) | upper }}{{ strftime_now('%Y') | int - 1 }}",
    "{% if strftime_now is defined %}{% macro m() %}{{ strftime_now('') ~ strftime_now('a%pb') }}{% endmacro %}"
    "{% for m_ in messages %}{{ m() }}{% endfor %}{% endif %}",
)  # fmt: skip
FIRST, LATER = datetime(2024, 2, 3, 4, 5, 6, 789), datetime(2025, 11, 28, 13, 14, 15)
TALK = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]


class At(datetime):
    """The clock of this process and of transformers, standing at `time`."""

    time = FIRST

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return cls.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[At]:
    monkeypatch.setattr(processes, "datetime", At)
    monkeypatch.setattr(chat_template_utils, "datetime", At)
    monkeypatch.setattr(At, "time", FIRST)
    return At


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = save_target(tmp_path / "target", num_hidden_layers=1)
    byte_tokenizer(THINKS).save_pretrained(folder)
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(40)))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"question": "why?"}))
    return folder


@pytest.mark.parametrize(("template", "arguments"), CASES)
def test_arguments_give_transformers_own_ids(template: str, arguments: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(template)
    for talk in (TALK[:1], [*TALK, *TALK[:1]]):
        asked: Any = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False, **arguments)
        for named in (template, {"default": template, "tool_use": "other"}):  # some models have several
            tokenizer.chat_template = named  # type: ignore[assignment]
            assert render_prompt(talk, bind_arguments(tokenizer, arguments)) == asked
            assert tokenizer.chat_template == named  # what is saved, and what a drafter is bound to


def test_what_the_template_does_not_read_is_refused() -> None:
    for template, arguments, said in (
        (THINKS, {"thinkin": False}, r"\.thinkin=False: expected style, thinking, .*did you mean 'thinking'\?$"),
        (THINKS, {"messages": []}, "expected style, thinking"), (LOOP, {"tojson": 1}, "expected opts, skip"),
        (BRANCH, {"own": 2}, "expected date,"), (None, {"x": 1}, "expected none"), ("{{ range(x) }}", {"range": 2},
        "expected x"), ("{{ strftime_now() }}", {"strftime_now": 1}, "expected none"),
        (THINKS, {"style": [math.inf]}, "what JSON has"), (THINKS, {"style": {1}}, "what JSON has"),
        ("{{ broken", {"broken": 1}, "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"^chat_template_kwargs.*{said}"):
            bind_arguments(byte_tokenizer(template), arguments)
    with pytest.raises(UserError, match="expected none"):
        bind_arguments(byte_tokenizer(THINKS), {"thinking": 1}, "vicuna")


@pytest.mark.parametrize("arguments", [{}, {"thinking": False}])
def test_every_command_renders_with_them(
    target: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids(talk: list[dict[str, str]], **options: Any) -> Any:
        options = {"return_dict": False, "add_generation_prompt": True, **arguments, **options}
        return byte_tokenizer(THINKS).apply_chat_template(talk, **options)

    opened, prompt, folder = open_target(str(target), by_layers=False), ids(TALK[:1]), target.parent
    given: Any = {"chat_template_kwargs": arguments}
    data = DataConfig("local", path=str(folder / "talk.jsonl"), cache_dir=str(folder), heldout_fraction=0.0, **given)
    mixed = DataConfig("mix", mix={"a": MixPart("local", path=data.path, **given)}, cache_dir=str(folder))
    for rows in (load_rows(one, opened.tokenizer, 64, "train")[0] for one in (data, mixed)):
        assert rows["input_ids"][rows["documents"] == 0].tolist() == ids(TALK, add_generation_prompt=False)
    config = GenerateConfig(target=str(target), data=data)
    (task,) = generate._read_prompts(config, opened, 256, lambda _: True).tasks
    assert task.prompt == prompt
    written: list[list[int]] = []
    monkeypatch.setattr(own_prompts, "generate", lambda *args: written.extend(
        task.prompt for task in args[-1](None, None, 256, lambda _: True).tasks))  # fmt: skip
    own_prompts._write_texts(PromptsConfig(target=str(target), count=1, **given), opened, folder, join_processes())
    assert [prompt[: len(start)] for start in written] == written != []
    asked = AuditConfig(target=str(target), server="http://h:1", prompts=str(folder / "prompts.jsonl"), **given)
    assert [*answers._names_by_prompt(asked, opened)] == [tuple(prompt)]
    model = outrider.load(str(target), device="cpu", **given)
    assert model.ids(TALK[:1]) == prompt
    assert model.ids(TALK[:1], "prompt", {"thinking": True}) == ids(TALK[:1], thinking=True) != prompt or not arguments
    text, more = model.generate(TALK[:1], max_new_tokens=3), {"style": "s", "thinking": False}
    assert text == model.generate(prompt, max_new_tokens=3)
    several = model.generate([TALK[:1], "text"], [{"chat_template_kwargs": more}, {}], max_new_tokens=3)
    assert several == [model.generate(one, max_new_tokens=3) for one in (ids(TALK[:1], **more), "text")]
    with pytest.raises(UserError, match="only a conversation is rendered"):
        model.generate("text", chat_template_kwargs=more)


def test_they_are_part_of_the_run(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers know them: with others a run does not go on, and who learns from the answers is warned."""
    folder, thinking = target.parent, {"chat_template_kwargs": {"thinking": False}}
    data = {"source": "local", "path": str(folder / "talk.jsonl")}
    made = {"target": str(target), "max_new_tokens": 4, "out_dir": str(folder / "made"), "batch_size": 4}
    generate.generate_responses(GenerateConfig(data=DataConfig(**data, **thinking), **made))
    with pytest.raises(UserError, match=r"was made with other settings: .*template="):
        generate.generate_responses(GenerateConfig(data=DataConfig(**data), resume=True, **made))
    (shard,), opened = (folder / "made").glob("*.jsonl"), open_target(str(target), by_layers=False)
    ids = json.loads(shard.read_text())["written"]["documents"][0]["ids"]
    data = {"source": "local", "path": str(shard), "cache_dir": str(folder), "heldout_fraction": 0.0}
    keys = []
    for options, warned in ((thinking, False), ({}, True)):
        capsys.readouterr()
        rows = load_rows(DataConfig(**data, **options), opened.tokenizer, 64, "train")
        keys.append(rows.key)
        assert (rows[0]["input_ids"][: len(ids)].tolist() == ids) is not warned
        assert ("its other arguments" in capsys.readouterr().err) is warned
        with pytest.raises(UserError, match="of another template") if warned else nullcontext():
            require_answers_of(opened, DataConfig(**data, **options))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("template", CLOCKS)
def test_the_clock_stands_during_a_run(template: str, clock: type[At], tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(TURN + template)

    def shown(time: datetime, resume: bool | None) -> list[int]:
        clock.time = time
        with only_run_of(join_processes(), tmp_path, "texts", resume):
            ids = render_prompt(["why?"], tokenizer)
            clock.time = datetime(1999, 1, 1)
            assert resume is None or render_prompt(["why?"], tokenizer) == ids
        return ids

    def own(time: datetime) -> Any:
        clock.time = time
        return tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)

    assert shown(FIRST, False) == own(FIRST) != own(LATER)
    assert shown(LATER, True) == own(FIRST)
    assert shown(LATER, False) == own(LATER)
    assert shown(FIRST, None) == own(FIRST)  # a server's: no run
    with only_run_of(join_processes(), tmp_path, "texts", True):
        with pytest.raises(UserError, match="its clock shows what is not known"):
            render_prompt(["why?"], byte_tokenizer("{{ strftime_now('%' ~ 'd') }}"))
        assert clock_of(byte_tokenizer(TURN)) == ""

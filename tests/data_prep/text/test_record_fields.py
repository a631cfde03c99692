"""What is read is all that is there: each field is read or named, and decoding would write what is learned."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.base import errors
from outrider.data_prep.text import documents, messages, records
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.rows import load_rows
from outrider.inference.measure.recordings import Vocabulary, recordings
from tests.data_prep.text.test_inputs import data_of, jsonl
from tests.inference.batch.test_written_tokens import Said, learned
from tests.support.chat_families import FAMILIES, Family, tokenizer_of

Pairs = list[tuple[str, str]]
SYSTEM = "Be brief."
ROLES = (("from", "value", "human", "gpt"), ("role", "content", "user", "assistant"))


def turns(pairs: Pairs, spelling: int, part: Callable[[str], object] = str) -> list[dict[str, object]]:
    role, content, user, assistant = ROLES[spelling]
    return [
        {role: name, content: part(text)} for pair in pairs for name, text in zip((user, assistant), pair, strict=True)
    ]


LAYOUTS: dict[str, Callable[[Pairs], dict[str, object]]] = {
    "sharegpt": lambda pairs: {"conversations": turns(pairs, 0)},
    "messages": lambda pairs: {"messages": turns(pairs, 1), "tools": "[]", "id": 7},
    "parts": lambda pairs: {
        "messages": turns(pairs, 1, lambda text: [{"type": "text", "text": text}]),
        "tools": "null",
    },
    "a table": lambda pairs: {"messages": json.dumps(turns(pairs, 1)), "history": "", "tools": ""},
    "texts": lambda pairs: {"data": [text for pair in pairs for text in pair], "tools": []},
    "alpaca": lambda pairs: {"instruction": pairs[-1][0], "output": pairs[-1][1], "history": [*map(list, pairs[:-1])]},
}


def talk_of(name: str) -> tuple[Pairs, list[str]]:
    """Two questions with their answers as a file has them, and as the target writes them."""
    family, texts = FAMILIES[name], ["Seven", "Seven is one"]
    if name == "field":
        return [("Prime?", "Seven."), ("More?", "Eleven.")], ["Seven.<|im_end|>", "Eleven.<|im_end|>"]
    if name in ("qwen3", "exaone4"):  # which write a thought
        texts, opening = [family.first, family.second], "<think>\n" * (name == "exaone4")
        return [("Prime?", opening + texts[0]), ("More?", opening + texts[1])], [text + family.end for text in texts]
    texts[1] += "</think>" * (name == "glm4")  # an added token that does not end an answer
    begin = {"mistral": " ", "llama2": " ", "gpt_oss": "<|channel|>final<|message|>"}.get(name, "")
    end = "<|end|>" if name == "gpt_oss" else family.end
    return [("Prime?", texts[0]), ("More?", texts[1])], [begin + text + end for text in texts]


def decoded(name: str, system: str, pairs: Pairs, answers: list[str]) -> list[Said]:
    """For each answer, what the target reads before it, and its tokens by itself."""
    tokenizer, found, known = tokenizer_of(FAMILIES[name]), list[Said](), list[list[int]]()
    head = [{"role": "system", "content": system}] * bool(system)
    for i, answer in enumerate(answers):
        talk = [*head, *turns(pairs, 1)[: 2 * i + 1]]
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        found.append((tuple(render_prompt(talk, tokenizer, "tokenizer", answer_ids=known)), tuple(ids)))
        known.append(ids)
    return sorted(found)


def of_file(path: Path, family: Family, rows: list[dict[str, object]]) -> list[Said]:
    path.write_text(jsonl(rows))
    return learned(data_of(path, cache_dir=str(path.parent / path.stem)), tokenizer_of(family))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_learned_is_what_decoding_reads_and_writes(tmp_path: Path, name: str) -> None:
    """Of every layout, with the system's text in a column, as a turn and without one."""
    pairs, answers = talk_of(name)
    for layout, make in LAYOUTS.items():
        for column in ("", "system", "system_prompt") if name != "gemma" else ("",):
            row = make(pairs) | ({column: SYSTEM} if column else {})
            found = of_file(tmp_path / f"{layout}{column}.jsonl", FAMILIES[name], [row])
            assert found == decoded(name, SYSTEM * bool(column), pairs, answers), (layout, column)


def _whole(prompt: list[int], answer: str, alone: list[int], tokenizer: Any) -> list[int]:
    """The tokens after the prompt's, if both are tokenised as one text."""
    return list(tokenizer(tokenizer.decode(prompt) + answer)["input_ids"][len(prompt) :])


@pytest.mark.parametrize(
    ("name", "where", "function", "fault"),
    [
        ("spaced", documents, "_answer_ids", _whole),
        ("qwen2", records, "to_messages", lambda raw, turns: messages.to_messages({}, turns)),
        ("glm4", documents, "_cut_at_end", lambda answer, *_: answer),
        ("phi", documents, "_cut_at_end", lambda answer, *_: answer),
    ],
)
def test_planted_faults_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: Any, function: str, fault: Any
) -> None:
    pairs, answers = talk_of(name)
    row = LAYOUTS["alpaca"](pairs) | {"system": SYSTEM}
    expected = decoded(name, SYSTEM, pairs, answers)
    assert of_file(tmp_path / "a.jsonl", FAMILIES[name], [row]) == expected
    monkeypatch.setattr(where, function, fault)
    assert of_file(tmp_path / "b.jsonl", FAMILIES[name], [row]) != expected


ASKED = {"role": "user", "content": "Prime?"}


def answer(**fields: object) -> list[dict[str, object]]:
    return [ASKED, {"role": "assistant", "content": "Seven.", **fields}]


def talk(*roles: tuple[str, object], **columns: object) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in roles], **columns}


S, THOUGHT = "Seven.<|im_end|>", "A prime."
TEMPLATE = FAMILIES["field"].template.replace("in messages", "in messages if m.role != 'system'")
TEMPLATE = TEMPLATE.replace("{{ m.content", "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{{ m.content")
CALL = {"function": {"name": "primes", "arguments": {"most": 1}}}
TWO = [*answer(weight=0, thought=THOUGHT), {"role": "user", "content": "More?"}, *answer(train=True)[1:]]
PAIR = (("user", "Prime?"), ("assistant", "Seven."))
CASES: dict[str, tuple[dict[str, object], str, str]] = {  # a record, what is learned of it, what is said
    "thought": ({"messages": answer(reasoning_content=THOUGHT)}, f"<think>A prime.</think>{S}", ""),
    "no name of the template's": ({"messages": answer(thought=THOUGHT)}, "", "leaves 'A prime.' of thought out"),
    "open thought": ({"messages": answer(content="<think>A", reasoning="B")}, "", "writes </think> around another"),
    "arguments": ({"messages": answer(tool_calls=[CALL])}, "", "whose arguments its chat template leaves out"),
    "unread system": (talk(("system", SYSTEM), *PAIR), S, "not read: field 'content' of a system turn"),
    "no text": ({"messages": answer(thinking=[THOUGHT])}, "", "turn 2: thinking=.*expected a text"),
    "weight": ({"messages": TWO}, S, ""),
    "no answer": ({"messages": answer(weight=0.0)}, "", "no answer of the assistant to learn from"),
    "half": ({"messages": answer(weight=0.5)}, "", "turn 2: weight=0.5: expected train"),
    "image": (talk(("user", [{"type": "image"}]), PAIR[1]), "", "turn 1 holds image"),
    "cut": (talk(*PAIR, finish_reason="length"), "Seven.", ""),
    "cut thought": (
        {"messages": answer(content=None, reasoning_content=THOUGHT), "finish": "length"},
        "<think>A prime.",
        "",
    ),
    "thought as a part": (talk(PAIR[0], ("assistant", [{"type": "reasoning_text", "text": "A"}])), "", "turn 2 holds"),
    "passage": (talk(*PAIR, context="Of 7."), S, "not read: column 'context'"),
    "field": ({"messages": answer(mood="glad")}, S, "not read: field 'mood' of a turn"),
    "column": (talk(*PAIR, functions=[1]), S, "not read: column 'functions', .*:1 and 2 other"),
    "facts": (talk(*PAIR, source="here", prompt="Prime?", score=3, text="To Prime?: Seven."), S, ""),
    "opening answer": (talk(PAIR[1], *PAIR), S, "not read: an answer before the first question"),
    "ragged": ({"messages": {"role": ["user"], "content": ["a", "b"]}}, "", "lists of one length"),
    "history": (talk(*PAIR, history=[["a"]]), "", "history=.*expected pairs"),
    "context": ({"instruction": "Prime?", "context": "Of 7 and 8.", "output": "7"}, "7<|im_end|>", ""),
    "text": ({"text": "Seven.", "system": "Be brief."}, S[3:], "not read: column 'system'"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_field_is_read_or_named_with_its_place_and_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """A record that is left out leaves the others in; what is not read is said again of rows that are there already."""
    row, expected, words = CASES[case]
    tokenizer, path = tokenizer_of(FAMILIES["field"]), tmp_path / "a.jsonl"
    tokenizer.chat_template = TEMPLATE
    last: dict[str, object] = {"instruction": "Prime?", "text": "Seven.", "messages": answer(), "output": "Seven."}
    last = {name: last[name] for name in last if name in row}
    path.write_text(jsonl([last, *[row] * 3]) if "messages" in last and not expected else jsonl([*[row] * 3, last]))
    for _ in range(2):
        errors.warn_once.cache_clear()
        rows = load_rows(data_of(path, cache_dir=str(tmp_path)), tokenizer, 512, "train")
        supervised = torch.cat([row["labels"][row["labels"] >= 0] for row in rows]).tolist()
        assert tokenizer.decode(supervised) == 3 * expected + (S[3:] if expected == S[3:] else S)
        warnings = capsys.readouterr().err
        assert bool(warnings) == bool(words)
        assert re.search(words, warnings)
        assert not words or f"{path}:" in warnings


def test_a_prompts_system_text_is_read_before_every_turn(tmp_path: Path) -> None:
    """By evaluation, and by replay, where it stands in place of Vicuna's."""
    (tmp_path / "p.jsonl").write_text(jsonl([{"question_id": 1, "system": SYSTEM, "turns": ["a", "b"]}]))
    (prompt,) = read_prompts(str(tmp_path / "p.jsonl"))
    roles = [message["role"] for message in prompt.messages(["a", "A", "b"])]
    assert roles == ["system", "user", "assistant", "user"]
    vocabulary = Vocabulary(lambda text: [*text.encode()], None, 0, "")
    first, _ = recordings([prompt], {"1": ["A", "B"]}, vocabulary)
    assert bytes(first.prompt).decode() == f"{SYSTEM} USER: a ASSISTANT:"

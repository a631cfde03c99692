"""Prompts in every layout that evaluation reads: asked as it asks them, answered turn by turn."""

import json
from dataclasses import replace

import pytest
import torch

from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.settings import DataConfig
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.tasks import Todo, read_tasks
from tests.data_prep.text.test_prompts import LAYOUTS
from tests.inference.batch.responding import ENDS, letter_tokenizer, responses

QUESTIONS = [{"id": i, "turns": [f"question {i}", "and more of it?" + "x" * (5 * i), "and at last?"]} for i in range(6)]


def _tasks(config):
    todo, tokenizer = Todo(), letter_tokenizer()
    tasks = list(read_tasks(config, tokenizer, todo))
    for task in tasks:
        todo.add(task, tokenizer)
    return tasks, todo.counts


@pytest.mark.parametrize("layout", ["auto", "prompts"])
@pytest.mark.parametrize(("row", "prompt"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_of_prompts_is_asked_as_evaluation_asks_it(make, row, prompt, layout):
    config = make([row])
    (task,), _ = _tasks(replace(config, data=replace(config.data, layout=layout)))
    tokenizer = letter_tokenizer()
    if prompt.chat:
        texts = [message["content"] for message in [*task.messages, *task.upcoming]]
        assert texts == [*filter(None, [prompt.system]), *prompt.turns]
    elif "text" in row and layout == "auto":  # a text to learn from, of which the beginning is a prompt
        assert task.prompt == render_prompt(prompt.turns, tokenizer, "none")[: len("Once") // 2]
    else:
        assert task.prompt == render_prompt(prompt.turns, tokenizer, "none")


def test_a_list_of_texts_is_asked_as_evaluation_asks_it(make, tmp_path):
    (tmp_path / "texts.json").write_text(json.dumps(["Translate a.", "Translate b."]))
    data = DataConfig(source="local", path=str(tmp_path / "texts.json"), layout="prompts", heldout_fraction=0.0)
    tasks, counts = _tasks(replace(make(), data=data))
    tokenizer = letter_tokenizer()
    assert [tokenizer.decode(task.prompt) for task in tasks] == ["Translate a.", "Translate b."]
    assert counts["texts"] == 2


def test_answers_to_several_questions_are_those_of_generate_turn_by_turn(make, model):
    config = make(QUESTIONS, max_new_tokens=20, greedy_tokens=20)
    generate_responses(config)
    tokenizer = letter_tokenizer()
    answered = []
    for record in responses(config).values():
        messages = record["messages"]
        for turn in range(0, len(messages), 2):
            prompt = torch.tensor([render_prompt(messages[: turn + 1], tokenizer)])
            room = min(20, 160 - prompt.shape[1])
            with torch.inference_mode():
                said = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                      max_new_tokens=room, eos_token_id=ENDS, pad_token_id=0)  # fmt: skip
            ended = int(said[0, -1]) in ENDS
            tokens = said[0, prompt.shape[1] : -1 if ended else None]
            assert messages[turn + 1]["content"] == tokenizer.decode(tokens, skip_special_tokens=True).strip()
        asked = next(row["turns"] for row in QUESTIONS if row["turns"][0] == messages[0]["content"])
        assert [m["content"] for m in messages[::2]] == asked[: len(messages) // 2]
        answered.append(len(messages) // 2)
        assert record["unanswered_turns"] == len(asked) - answered[-1]
    assert max(answered) > 1
    first = make(QUESTIONS, name="first", max_new_tokens=20, turns="first")
    generate_responses(first)
    assert {len(record["messages"]) for record in responses(first).values()} == {2}

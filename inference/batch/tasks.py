"""The prompts that a run answers, read from the data, each once; and a target's answers to them.

A record is a conversation (messages) or a plain text. A task is made of a record: a prompt, which is token ids.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError, require
from outrider.base.streams import Streams
from outrider.base.words import format_seconds
from outrider.data_prep.text.chat import TEMPLATE, adds_bos, render_prompt
from outrider.data_prep.text.messages import Message, system_and_questions, uses_tools
from outrider.data_prep.text.prompt_records import asks_answer
from outrider.data_prep.text.records import Counts, Record, TokenisedText, append_answer, warn_of_unused
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.targets.model_spec import UNLIMITED
from outrider.draft_models.targets.vocabulary import UnusableTextError, require_rows
from outrider.inference.batch.settings import GenerateConfig

WRITTEN_ONLY = "own"  # the template of texts whose beginnings are no prompts: only what the target writes counts
_CHARS_A_TOKEN = 32  # upper bound: only this much of a long text is tokenised to find its first tokens


class TopK(NamedTuple):
    """The target's own distribution (temperature 1) at each of n emitted tokens: the top k, and the rest."""

    tokens: Tensor  # int64 [n]: the emitted tokens
    ids: Tensor  # int64 [n, k]: the k most likely tokens, most likely first
    logprobs: Tensor  # float32 [n, k]: of these
    tail: Tensor  # float32 [n]: the total probability of all other tokens

    def at(self, indices: slice | Tensor) -> "TopK":
        return TopK(*(column[indices] for column in self))

    def then(self, continuation: "TopK") -> "TopK":
        """These tokens, followed by those of `continuation`."""
        return TopK(*(torch.cat(columns) for columns in zip(self, continuation, strict=True)))


@dataclass(frozen=True)
class Answer:
    """The continuation of one prompt."""

    tokens: tuple[int, ...] = ()  # with the end token
    ended: bool = False  # by an end token, not by the limit of tokens
    top: TopK | None = None
    retokenised: bool = False  # whether the tokens are of a text, as a server gave no ids
    failure: str = ""  # why it is no usable answer, else empty: memory | not_a_number | server | retokenised

    @property
    def content(self) -> tuple[int, ...]:
        """The tokens without the end token."""
        return self.tokens[:-1] if self.ended else self.tokens


def uniforms(seed: int, task_id: str, turn_index: int, count: int) -> Tensor:
    """`count` uniform float64 numbers in [0, 1), fixed by the other arguments. A smaller count gives a prefix."""
    return torch.from_numpy(Streams(seed, task_id).arrays("response", turn_index).random(count))


@dataclass
class Task:
    """A prompt, and its answers so far."""

    id: str
    source: str  # the location of the record
    template: str  # how messages become text, or `WRITTEN_ONLY`
    prompt: list[int]  # token ids to continue now
    messages: list[Message] | None = None  # up to the user's turn to answer, included; None for a plain text
    bare: Sequence[str | Message] = ()  # the texts or messages to render without a template
    upcoming: list[Message] = field(default_factory=list)  # the user's turns after `messages`
    answers: list[Answer] = field(default_factory=list)
    top: TopK | None = None  # distributions at the answers' tokens
    documents: list[TokenisedText] = field(default_factory=list)  # of prompts and answers; turns share one if possible
    difference: str = ""  # the first place where the text of an answer gives other tokens than the target wrote
    retokenised: bool = False  # whether a server gave text instead of tokens
    problem: str = ""  # why there is no answer, or no further answer; else empty
    detail: str = ""  # of the problem

    def keep(self, answer: Answer) -> None:
        """Add an answer to the current prompt; to the document of earlier answers if the prompt begins with these."""
        if answer.top is not None:
            self.top = answer.top if self.top is None else self.top.then(answer.top)
        self.documents = append_answer(self.documents, self.prompt, answer.tokens)
        self.answers.append(answer)
        self.retokenised |= answer.retokenised

    @property
    def skip_record(self) -> dict[str, str]:
        """The entry for a prompt without an answer in the list of skipped prompts."""
        return {"id": self.id, "source": self.source, "reason": self.problem, "detail": self.detail}


@dataclass
class Todo:
    """The prompts of one process, and the counts from reading all prompts."""

    context: int = UNLIMITED  # of the target, in tokens
    tasks: list[Task] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)  # their `Task.skip_record`
    counts: Counts = field(default_factory=Counts)

    def add(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        """Add a task; it is skipped if it has a problem or fills the target's context."""
        if not task.problem:  # not earlier: most tasks may belong to other processes, or be done
            render_task(task, tokenizer, self.context)
        if not task.problem and len(task.prompt) >= self.context:
            task.problem, task.detail = "too_long", f"{len(task.prompt)} tokens in a context of {self.context}"
        if task.problem:
            self.skipped.append(task.skip_record)
            self.counts.refuse("skipped", f"{task.source}: {task.detail or task.problem}")
        else:
            self.tasks.append(task)


def prompt_id(messages: Sequence[Message] = (), text: str = "") -> str:
    """The id of a prompt: a hash of its system and user messages, or of its plain text."""
    turns = [[m["role"], m["content"]] for m in messages if m["role"] != "assistant"]
    return hashlib.sha256(json.dumps([turns, text]).encode()).hexdigest()[:32]


def read_tasks(config: GenerateConfig, tokenizer: PreTrainedTokenizerBase, todo: Todo) -> Iterator[Task]:
    """Each distinct prompt of the training records, in the order of the data; `todo.counts` counts the records. Raises
    `UserError` if conversations and plain texts are mixed, because a file of answers has one layout, and for a share of
    prompts that would be held out."""
    seen_ids: set[str] = set()
    for data in [source_data for _, _, source_data in config.data.parts()] or [config.data]:
        for record in read_records(data, "train", todo.counts, asking=True):
            if asks_answer(record):
                held_out, default = config.data.heldout_fraction, DataConfig.heldout_fraction
                expected = f"{default:g} or 0: all prompts are answered, and a training holds out a part of the answers"
                require(held_out in (0, default), "data.heldout_fraction", held_out, expected)
            task = _to_task(record, data, config, tokenizer)
            if task.id in seen_ids:
                todo.counts["duplicates"] += 1
                continue
            seen_ids.add(task.id)
            todo.counts["prompts"] += 1
            todo.counts["texts" if "text" in record or data.template == "none" else "conversations"] += 1
            if todo.counts["texts"] and todo.counts["conversations"]:
                raise UserError(f"{task.source}: data has both plain texts and conversations; answer them in two runs")
            yield task
    warn_of_unused(todo.counts, todo.counts.first)


def _to_task(record: Record, data: DataConfig, config: GenerateConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    if "text" in record and record.get("asked"):  # a prompt, to be continued from its end
        return Task(prompt_id(text=record["text"]), record["id"], data.template, [], bare=(record["text"],))
    if "text" in record:
        prefix_text = record["text"][: config.prefix_tokens * _CHARS_A_TOKEN]
        ids = tokenizer(prefix_text, add_special_tokens=False, verbose=False)["input_ids"]
        ids = list(ids[: min(config.prefix_tokens, max(1, len(ids) // 2))])
        task_id = prompt_id(text=str(tokenizer.decode(ids)))
        problem = "" if ids else "no_question"
        if adds_bos(tokenizer):
            ids.insert(0, tokenizer.bos_token_id)
        return Task(task_id, record["id"], data.template, ids, problem=problem)
    system_messages, questions = system_and_questions(record["messages"])
    questions = questions[: 1 if config.turns == "first" else None]
    first_messages, problem = [*system_messages, *questions[:1]], "" if questions else "no_question"
    if uses_tools(record["messages"]):
        problem = "tools"  # the target does not write a tool's results
    elif data.template == "none" and questions:  # a text to continue: the answer is its continuation, letter by letter
        return Task(prompt_id(first_messages), record["id"], data.template, [], bare=first_messages)
    task_id = prompt_id([*system_messages, *questions])
    return Task(task_id, record["id"], data.template, [], first_messages, upcoming=questions[1:], problem=problem)


def render_task(task: Task, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
    """Set the prompt of a task; if the target cannot use this prompt, set the task's problem instead."""
    template, answer_ids = "none" if task.bare else task.template, [answer.tokens for answer in task.answers]
    try:
        if turns := task.messages or task.bare:
            task.prompt = render_prompt(
                turns, tokenizer, template, option=TEMPLATE, answer_ids=answer_ids, context=context
            )
        else:
            require_rows(task.prompt, tokenizer, "prompt")
    except UnusableTextError as error:
        task.problem, task.detail = error.reason, str(error)


def describe_first(config: GenerateConfig, answered: int, prompt_count: int, tokens: int, seconds: float) -> str:
    """An estimate of the time of all prompts, from a first batch of `answered` prompts, its `tokens` and `seconds`."""
    batch_count = prompt_count / answered
    facts = f"responses first_batch={answered}/{prompt_count} tokens_per_s={tokens / seconds:.0f}"
    duration_text = format_seconds(batch_count * seconds)
    return f"{facts} all_tokens={batch_count * tokens:.0f} all_take='{duration_text}': {describe_limit(config)}"


def describe_texts(tasks: Sequence[Task], answered: int) -> str:
    """A warning if texts of `tasks` give other tokens than the target wrote, else ""; answered: prompts so far."""
    retokenised_count, different = sum(task.retokenised for task in tasks), [task for task in tasks if task.difference]
    lines = []
    if retokenised_count:
        lines.append(f"retokenised={retokenised_count}/{answered}, as the server gives no token ids")
    if different:
        note = "tokenising the text gives other tokens than the target wrote; training uses the target's; first"
        first_task = different[0]
        lines.append(f"text_differs={len(different)}/{answered}: {note} {first_task.source}, {first_task.difference}")
    return "\n".join(f"responses {line}" for line in lines)


def describe_limit(config: GenerateConfig) -> str:
    if config.minutes is not None:
        return f"minutes={config.minutes:g} end it at the latest"
    return "all are answered; minutes= would end it earlier, data.max_records= makes them fewer"

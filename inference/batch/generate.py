"""Self-distillation text: the target's own answers to the prompts of a data set (EESD, section 3.2)."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.errors import UserError
from outrider.base.files import require_writable, write_json
from outrider.base.processes import from_main, join_processes, only_run_of
from outrider.base.progress import Stage
from outrider.base.run_dirs import code_version
from outrider.data_prep.text.chat import parting, spoken, warn_of_template
from outrider.data_prep.text.documents import written_by
from outrider.data_prep.text.records import HELDOUT_BY, Written, text_digest
from outrider.draft_models.targets.fingerprint import deciding_config, model_identity
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.open_target import OpenTarget, open_target, pick_dtype, why_not_by_layers
from outrider.draft_models.targets.proof import NotByLayersError
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.vocabulary import tokenizer_digest
from outrider.inference.batch.batch_decoder import Generator
from outrider.inference.batch.client import UNANSWERED
from outrider.inference.batch.directory import (
    SECONDS_FILE,
    SUMMARY_FILE,
    Response,
    Shard,
    answered,
    check_run,
    next_number,
    open_run,
    seconds_spent,
    summarise,
)
from outrider.inference.batch.server import Server
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.batch.tasks import (
    Answer,
    Task,
    Todo,
    describe_first,
    describe_texts,
    ending,
    read_tasks,
    render,
    uniforms,
)
from outrider.inference.core.sampling import Sampler
from outrider.inference.engines.cpu.by_amx import has_amx
from outrider.inference.engines.cpu.recorded import can_pack, ruled
from outrider.inference.engines.packing import lay_out, pack_linears
from outrider.inference.loading.memory_plan import (
    Held,
    Place,
    cache_bytes,
    describe,
    explained,
    planned_device,
    target_memory,
)
from outrider.inference.loading.rehearsal import rehearsable
from outrider.inference.loading.targets import end_tokens
from outrider.inference.measure.time_limit import TimeLimit

Facts = dict[str, Any]
_TOGETHER = 4  # batches, at most, whose prompts join each other as places become free


@rehearsable
def generate_responses(config: GenerateConfig) -> None:
    """Answer the prompts of `config.data` and write the answers to `config.out_dir` (see `responses.directory`).

    Prompts are assigned to processes by their ids; each process writes its own shards. An answer depends on its prompt,
    the target, the seed and the decoding options. It does not depend on processes, batches, or interruptions of the
    run. With resume=true, prompts that were answered or skipped before are not repeated; the data may have grown since.
    With `minutes`, the time limit determines how many prompts are answered; a resumed run with a larger one continues.

    Raises `UserError` for an unusable target, data set or directory, and if another run is writing there.
    """
    if config.plan:
        print(_plan(config), flush=True)
        return
    state, folder = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, folder, "responses"):
        _generate(config, folder, state)


def _plan(config: GenerateConfig) -> str:
    target = open_target(config.target, config.revision, by_layers=False)
    context, done = context_length(target.config), answered(Path(config.out_dir)) if config.resume else set()
    todo = _read(config, target, context, lambda task: task.id not in done)
    return describe_plan(config, target.config, todo.tasks, context)


def describe_plan(config: GenerateConfig, target: PreTrainedConfig, tasks: Sequence[Task], context: int) -> str:
    """The plan as text: its memory (see `memory_plan.describe`), then what bounds the answers.

    tasks: all prompts to answer. context: the target's, in tokens.
    """
    turns = sum(1 + len(task.upcoming) for task in tasks)
    facts = {"prompts": len(tasks), "turns": turns, "tokens_at_most": turns * config.max_new_tokens}
    longest = max((_longest(task, config, context) for task in tasks), default=0)
    plan = describe(memory_of(config, target, longest), config.server or planned_device(), **facts)
    return f"{plan}\n  {ending(config)}; the first batch tells how long all prompts take"


def memory_of(config: GenerateConfig, target: PreTrainedConfig, longest: int) -> list[Held]:
    """Of one device, or of all GPUs of one process with device_map. longest: the tokens of the longest text."""
    if config.server:
        return []
    place = Place.of(config.dtype, target, longest, planned_device())
    texts = f"keys and values of {config.batch_size} texts of up to {longest} tokens"
    caches = Held(texts, config.batch_size * cache_bytes(target, place), "batch_size or max_new_tokens")
    return [*target_memory(target, place), caches]


def _longest(task: Task, config: GenerateConfig, context: int) -> int:
    """An upper bound on the tokens of a prompt with its answers; a later turn is counted by its bytes."""
    later = sum(len(turn.encode(errors="replace")) for turn in task.upcoming)
    return min(context, len(task.prompt) + later + config.max_new_tokens * (1 + len(task.upcoming)))


def _read(config: GenerateConfig, target: OpenTarget, context: int, wanted: Callable[[Task], bool]) -> Todo:
    """The prompts to answer. Raises `UserError` for data without any, or of which none can be answered."""
    warn_of_template(config.data, target.tokenizer)
    todo = Todo(context)
    for task in read_tasks(config, target.tokenizer, todo):
        if wanted(task):
            todo.add(task, target.tokenizer)
    if len(todo.skipped) == todo.counts["prompts"]:
        found = ", ".join(f"{name}={count}" for name, count in todo.counts.items()) or "nothing"
        why = todo.counts.first or "give more data"
        raise UserError(f"data source={config.data.source}: no prompt in it can be answered (found {found}); {why}")
    return todo


def _generate(config: GenerateConfig, folder: Path, state: PartialState) -> None:
    target = open_target(config.target, config.revision, by_layers=False)
    dtype = pick_dtype(config.dtype, target.config, state.device)
    if config.device_map is not None and state.num_processes > 1:
        raise UserError(f"device_map={config.device_map}: one process has all GPUs then; start one, not several")
    context = context_length(target.config)
    asked = (config, target.tokenizer, end_tokens(target), context, target.config.vocab_size)
    server = Server(*asked) if config.server else None
    kernels = "a server's" if server else kernels_here(state.device, dtype)
    identity = from_main(state, lambda: run_identity(config, target, dtype, server) | {"kernels": kernels})
    if (first := identity["kernels"]) != kernels:
        raise UserError(f"one process multiplies by kernels {first!r}, another by {kernels!r}: use like machines")
    check_run(folder, identity, config.resume, config)
    identity["code"] = code_version()
    done, first, spent = from_main(state, lambda: (answered(folder), next_number(folder), seconds_spent(folder)))
    first += state.process_index
    state.wait_for_everyone()  # all processes list the shards before a new one appears
    if state.is_main_process:
        open_run(folder, identity)
    state.wait_for_everyone()

    def own(task: Task) -> bool:
        return task.id not in done and int(task.id, 16) % state.num_processes == state.process_index

    todo = _read(config, target, server.context if server else context, own)
    limit = TimeLimit(config.minutes, earlier=spent)
    if limit.is_over(spent):
        todo.tasks.clear()
    with explained(lambda: memory_of(config, target.config, context)):
        responder = Responder(config, target, dtype, state.device, server) if todo.tasks else None
        rate = respond(config, responder, todo, folder, range(first, 10**9, state.num_processes), state, limit)
    state.wait_for_everyone()
    if state.is_main_process:
        summary = {**todo.counts, **summarise(folder)}
        write_json(folder / SUMMARY_FILE, summary)
        print(f"responses out_dir={folder} {_words(summary)} tokens_per_second_a_process={rate:.0f}", flush=True)
        if summary["skipped"]:
            print(f"skipped prompts are listed in {folder}/skipped-*.jsonl", flush=True)
    state.wait_for_everyone()


# --------------------------------------------------------------------------------------------------- answers


class Responder:
    """Answers tasks with the target, which is loaded here or runs on a server."""

    def __init__(
        self,
        config: GenerateConfig,
        target: OpenTarget,
        dtype: torch.dtype,
        device: torch.device,
        server: Server | None = None,
    ):
        self.config, self.tokenizer = config, target.tokenizer
        self.generator: Generator | Server
        self.by_layers: Generator | None = None  # the same, if it can `converse`
        if server is not None:
            self.context, self.generator = server.context, server
            return
        self.context = context_length(target.config)
        model = load_target(config, target, dtype, device)
        self.generator = generator = Generator(
            model,
            Sampler(config.sampling),
            end_tokens(target),
            greedy_tokens=config.greedy_tokens,
            top_k_logits=config.top_k_logits,
        )
        self.by_layers = generator if isinstance(model, LayerStack) else None

    def answer(self, tasks: Iterable[Task]) -> None:
        """Answer all turns of the tasks: one turn of all tasks at a time.

        Over layers each turn when it can be asked, and of `batch_size` tasks at a time: others join as these end.
        """
        waiting = list(tasks)
        if self.by_layers is not None:
            asked, others = waiting[: self.config.batch_size], iter(waiting[self.config.batch_size :])

            def take(place: int, answer: Answer) -> tuple[Sequence[int], torch.Tensor] | None:
                if not self._take(asked[place], answer):
                    if (task := next(others, None)) is None:
                        return None
                    asked[place] = task
                return asked[place].prompt, self._draws(asked[place])

            self.by_layers.converse([task.prompt for task in asked], [*map(self._draws, asked)], take)
            return
        while waiting:
            answers = self.generator.answer([task.prompt for task in waiting], [self._draws(task) for task in waiting])
            waiting = [task for task, answer in zip(waiting, answers, strict=True) if self._take(task, answer)]

    def response(self, task: Task) -> Response:
        """The record of a task with an answer, and the target's distributions at the answers' tokens."""
        shown: Facts = {"id": task.id}
        if task.messages is None:
            shown |= {"text": self._text([*task.prompt, *task.answers[0].said]), "prompt_tokens": len(task.prompt)}
        else:
            shown |= {"messages": task.messages, "unanswered_turns": len(task.upcoming)}
        shown["tokens"] = sum(len(answer.tokens) for answer in task.answers)
        shown["finish"] = "end" if task.answers[-1].ended else "length"
        shown |= {"retokenised": task.retokenised, "text_differs": bool(task.parted)}
        made = (*written_by(shown, self.tokenizer, task.template), text_digest(shown))
        shown["written"] = asdict(Written(*made, task.documents))
        return Response(shown, task.top)

    def _draws(self, task: Task) -> torch.Tensor:
        room = min(self.config.max_new_tokens, self.context - len(task.prompt))
        return uniforms(self.config.seed, task.id, len(task.answers), room)

    def _take(self, task: Task, answer: Answer) -> bool:
        """Add an answer to its task; returns whether to answer the user's next turn."""
        text = spoken(answer.said, self.tokenizer).rstrip("\ufffd").strip()
        task.problem = answer.failure or ("" if text else "empty")
        if not (task.problem or answer.ended or self.config.keep_truncated):
            task.problem = "truncated"
        if task.problem:
            if task.messages is not None:
                task.upcoming.insert(0, task.messages.pop()["content"])
            return False
        task.keep(answer)
        if task.messages is None:
            whole = [*task.prompt, *answer.said]
            shown = [{"role": "assistant", "content": self._text(whole)}]
            task.parted = parting(whole, shown, self.tokenizer, "none")
            return False
        before, through = map(self._verbatim, (task.prompt, [*task.prompt, *answer.said]))
        verbatim = through[len(before) :]  # with the space that some tokenizers leave out where a text begins
        written, asked = task.documents[-1].ids, task.messages
        task.messages = [*asked, {"role": "assistant", "content": verbatim}]
        if parting(written, task.messages, self.tokenizer, task.template):
            task.messages = [*asked, {"role": "assistant", "content": text}]
            task.parted = task.parted or parting(written, task.messages, self.tokenizer, task.template)
        return bool(answer.ended and task.upcoming) and self._ask_next(task)

    def _ask_next(self, task: Task) -> bool:
        """Add the user's next turn; False if it cannot be answered, and the conversation then ends before it."""
        assert task.messages is not None
        task.messages.append({"role": "user", "content": task.upcoming.pop(0)})
        render(task, self.tokenizer, self.context)
        if task.problem or len(task.prompt) >= self.context:
            task.upcoming.insert(0, task.messages.pop()["content"])
            return False
        task.parted = task.parted or parting(task.documents[-1].ids, task.messages, self.tokenizer, task.template)
        return True

    def _verbatim(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def _text(self, tokens: Iterable[int]) -> str:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).rstrip("\ufffd")  # an incomplete character at the end of the budget


def batches(tasks: Iterable[Task], config: GenerateConfig) -> list[list[Task]]:
    """The tasks in batches of similar prompt lengths.

    Longest prompts come first, so that a batch too large for memory fails at once. With `minutes` the batches are
    ordered by the prompts' hashes, so that the prompts answered within the time are of all lengths.
    """
    ordered = sorted(tasks, key=lambda task: (-len(task.prompt), task.id))
    made = [ordered[start : start + config.batch_size] for start in range(0, len(ordered), config.batch_size)]
    return made if config.minutes is None else sorted(made, key=lambda batch: batch[0].id)


def respond(
    config: GenerateConfig,
    responder: Responder | None,
    todo: Todo,
    folder: Path,
    numbers: Iterable[int],
    state: PartialState,
    limit: TimeLimit,
) -> float:
    """Answer the tasks of this process and write its shards, numbered by `numbers`; returns tokens per second.

    If `limit` has no time for a batch, none begins; the collected responses become the last shard.
    """
    free, limit, shown = iter(numbers), replace(limit, started=limit.clock()), state.is_main_process
    shard, answered, unanswered, tokens, told = Shard(skipped=list(todo.skipped)), 0, 0, 0, ""

    def seconds() -> float:
        """Seconds of this run alone."""
        return limit.spent() - limit.earlier

    def left() -> float | None:
        """Seconds until all prompts are answered, or the time is over; None before the first batch."""
        if not answered:
            return None
        rest = seconds() / answered * (len(todo.tasks) - answered)
        return rest if limit.minutes is None else max(0.0, min(rest, 60 * limit.minutes - limit.spent()))

    def save() -> None:
        shard.save(folder, next(free))
        if shown:
            write_json(folder / SECONDS_FILE, {"seconds": limit.spent()})

    with Stage("answering", len(todo.tasks), "prompts", left=left) as stage:
        made, number = batches(todo.tasks, config), 0
        while number < len(made):
            assert responder is not None
            several = 1
            if number and responder.by_layers is not None:  # as many as a kill may lose, and half the time holds
                most = min(_TOGETHER, (config.shard_size - len(shard)) // config.batch_size)
                several = max(1, int(min(most, limit.left(limit.spent()) / max(2 * seconds() / number, 1e-9))))
            batch = [task for one in made[number : number + several] for task in one]
            number = min(number + several, len(made))
            responder.answer(batch)
            done = [task for task in batch if task.problem != UNANSWERED]
            shard.responses += [responder.response(task) for task in done if task.answers]
            shard.skipped += [task.skipped for task in done if not task.answers]
            answered, unanswered = answered + len(batch), unanswered + len(batch) - len(done)
            tokens += sum(len(answer.tokens) for task in batch for answer in task.answers)
            stage.advance(len(batch))
            if shown and not told and (told := describe_texts(batch, answered)):
                print(told, flush=True)
            if shown and answered == len(batch) < len(todo.tasks):
                print(describe_first(config, answered, len(todo.tasks), tokens, seconds()), flush=True)
            if len(shard) >= config.shard_size:
                save()
                shard = Shard()
            if not limit.holds(limit.spent(), seconds() / number):
                if shown and answered < len(todo.tasks):
                    alone = ", which is one batch; a smaller batch_size or max_new_tokens makes it shorter"
                    print(f"{limit.minutes:.3g} minutes hold no further batch: {answered} of {len(todo.tasks)} prompts "
                          f"are answered{alone if number == 1 else ''}", flush=True)  # fmt: skip
                break
    if len(shard):
        save()
    if unanswered:
        print(f"unanswered={unanswered} prompts, by the server's fault; resume=true asks for them again", flush=True)
    return tokens / max(seconds(), 1e-9)


# ---------------------------------------------------------------------------------------------------- target


def load_target(
    config: GenerateConfig, target: OpenTarget, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel | LayerStack:
    """The target's layers, where their passes for several texts are as fast as padded ones; else the whole model.

    Laid out by rule: a resumed run must not round otherwise. Raises `UserError`.
    """
    if device.type == "cpu" and config.device_map is None and why_not_by_layers(target.config) is None:
        with suppress(NotByLayersError), ruled():
            stack = target.stack(dtype=dtype, device=device)
            lay_out(stack, device)
            return stack
    model = load_causal_lm(config.target, config.revision, dtype=dtype, device_map=config.device_map)
    if config.device_map is None:
        model.to(device)  # type: ignore[arg-type]  # its stub is a decorator's
        if can_pack(device, dtype):
            pack_linears(model)
    return model.eval()


def kernels_here(device: torch.device, dtype: torch.dtype) -> str:
    """The matrix kernels used here. A resumed run and all processes must use the same: others round differently.

    They are determined by the machine, not by timing.
    """
    if not can_pack(device, dtype):
        return "PyTorch's"
    return "blocked" + (", steps by AMX" if has_amx() else "")


def context_length(target: PreTrainedConfig) -> int:
    """The target's context length in tokens; practically unlimited if its config has no limit."""
    return getattr(target.get_text_config(), "max_position_embeddings", None) or 2**31


def run_identity(config: GenerateConfig, target: OpenTarget, dtype: torch.dtype, server: Server | None = None) -> Facts:
    """Everything that determines the answer to a prompt, and the prompts made from a record."""
    tokenizer = target.tokenizer
    if server:  # whose weights are not read here
        known: Facts = {"served": server.model, "model": {"config": deciding_config(target.source, target.revision)}}
    else:
        known = {"dtype": str(dtype).removeprefix("torch."), "model": model_identity(target.files)}
    templates = [part.template for _, _, part in config.data.parts()] or [config.data.template]
    return {
        **config.deciding(),
        **known,
        "end_tokens": sorted(end_tokens(target)),
        "tokenizer": tokenizer_digest(tokenizer)[:16],
        "template": [tokenizer.chat_template if name == "tokenizer" else name for name in templates],
        **({"heldout_by": HELDOUT_BY} if config.data.heldout_fraction else {}),
    }


def _words(summary: Facts) -> str:
    flat = {**summary, **{f"skipped_{reason}": count for reason, count in summary["skipped_by_reason"].items()}}
    return " ".join(f"{key}={value}" for key, value in flat.items() if isinstance(value, int))

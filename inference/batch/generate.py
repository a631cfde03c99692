"""Self-distillation text: the target's own answers to the prompts of a data set (EESD, section 3.2).

A `Task` is a prompt and its answers so far. `Todo` has the tasks of this process. A shard is a file of answers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from accelerate import PartialState

from outrider.base.errors import UserError
from outrider.base.files import require_writable, write_json
from outrider.base.processes import from_main, join_processes, only_run_of
from outrider.base.progress import Stage
from outrider.base.run_dirs import code_version
from outrider.data_prep.text.chat import warn_of_template
from outrider.data_prep.text.records import HELDOUT_BY
from outrider.draft_models.targets.fingerprint import deciding_config, model_identity
from outrider.draft_models.targets.model_spec import UNLIMITED, context_limit
from outrider.draft_models.targets.open_target import OpenTarget, pick_dtype
from outrider.draft_models.targets.unseen_target import open_given
from outrider.draft_models.targets.vocabulary import bind_arguments, tokenizer_digest
from outrider.inference.batch import directory
from outrider.inference.batch.client import UNANSWERED
from outrider.inference.batch.responder import Responder
from outrider.inference.batch.server import TargetServer
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.batch.tasks import Task, Todo, describe_first, describe_limit, describe_texts, read_tasks
from outrider.inference.engines.cpu.by_amx import has_amx
from outrider.inference.engines.cpu.recorded import can_pack
from outrider.inference.loading import memory_plan
from outrider.inference.loading.memory_plan import Memory, Plan, Storage, planned_device
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.measure.time_limit import TimeLimit

SAVE_SECONDS = 300  # after which the next batch ends a shard that is not full
_MAX_GROUPS = 4  # most batches that are answered together: a prompt of the next batch begins when an answer ends
# (config, target, its context, selects) → the tasks for which `selects` is true.
ReadTasks = Callable[[GenerateConfig, OpenTarget, int, Callable[[Task], bool]], Todo]


def generate_responses(config: GenerateConfig) -> None:
    """Answer the prompts of `config.data` and write the answers to `config.out_dir` (see `batch.directory`).

    Prompts are assigned to processes by their ids; each process writes its own shards. An answer depends on its prompt,
    the target, the seed and the decoding options. Where the target's layers run on a CPU it does not depend on
    processes, batches, or interruptions of the run. On a GPU the other prompts of a batch change last bits of logits,
    and so now and then a token. With resume=true, prompts that were answered or skipped before are not repeated; the
    data may have grown since. With `minutes`, the time limit determines how many prompts are answered; a resumed run
    with a larger one continues.

    Raises `UserError` for an unusable target, data set or directory, and if another run is writing there.
    """
    if config.plan:
        print(_plan(config), flush=True)
        return
    state, folder = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, folder, "responses", config.resume):
        generate(config, folder, state, _read_prompts)


def _plan(config: GenerateConfig) -> str:
    """The plan as text: its memory (see `Plan`), then what bounds the answers."""
    target = open_given(config, by_layers=False)
    context_size = context_limit(target.config)
    done_ids = directory.answered_ids(Path(config.out_dir)) if config.resume else set()
    tasks = _read_prompts(config, target, context_size, lambda task: task.id not in done_ids).tasks
    turn_count = sum(1 + len(task.upcoming) for task in tasks)
    plan_counts = {"prompts": len(tasks), "turns": turn_count, "tokens_at_most": turn_count * config.max_new_tokens}
    max_text_tokens = max((_longest(task, config, context_size) for task in tasks), default=0)
    plan = Plan(memory_of(config, target, max_text_tokens), plan_counts, config.server or planned_device())
    return f"{plan}\n  {describe_limit(config)}; the first batch tells how long all prompts take"


def memory_of(config: GenerateConfig, target: OpenTarget, max_text_tokens: int) -> list[Memory]:
    """The memory of one device, or with device_map of all GPUs together. max_text_tokens: of the longest text."""
    if config.server:
        return []
    storage = Storage.of(config.dtype, target.config, max_text_tokens, device := planned_device())
    cache_label = f"keys and values of {config.batch_size} texts of up to {max_text_tokens} tokens"
    cache_bytes = config.batch_size * memory_plan.cache_bytes(target.config, storage)
    cache_memory = Memory(cache_label, cache_bytes, "batch_size or max_new_tokens")
    return [*memory_plan.decoding_memory(target, storage, device), cache_memory]


def _longest(task: Task, config: GenerateConfig, context: int) -> int:
    """An upper bound on the tokens of a prompt with its answers; a later turn is counted by its bytes."""
    later_bytes = sum(len(turn["content"].encode(errors="replace")) for turn in task.upcoming)
    return min(context, len(task.prompt) + later_bytes + config.max_new_tokens * (1 + len(task.upcoming)))


def _read_prompts(config: GenerateConfig, target: OpenTarget, context: int, selects: Callable[[Task], bool]) -> Todo:
    """The prompts to answer (see `ReadTasks`). Raises `UserError` for data without a prompt that can be answered."""
    warn_of_template(config.data, target.tokenizer)
    todo, tokenizer = Todo(context), bind_arguments(target.tokenizer, config.template_arguments)
    for task in read_tasks(config, tokenizer, todo):
        if selects(task):
            todo.add(task, tokenizer)
    if len(todo.skipped) == todo.counts["prompts"]:
        tally = ", ".join(f"{name}={count}" for name, count in todo.counts.items()) or "nothing"
        reason = todo.counts.first or "give more data"
        raise UserError(f"data source={config.data.source}: no prompt in it can be answered (found {tally}); {reason}")
    return todo


def generate(config: GenerateConfig, folder: Path, state: PartialState, read: ReadTasks) -> None:
    """Answer the tasks that `read` returns and write the answers to an existing folder."""
    target = open_given(config, by_layers=False)
    dtype = pick_dtype(config.dtype, target.config, state.device)
    if config.device_map is not None and state.num_processes > 1:
        raise UserError(f"device_map={config.device_map}: one process has all GPUs then; start one, not several")
    context = context_limit(target.config)
    server_args = (config, target.tokenizer, end_tokens(target), context, target.vocabulary_size or UNLIMITED)
    server = TargetServer(*server_args) if config.server else None
    # Other kernels round differently. The machine determines which kernels run here, not a timing.
    local_kernel = "blocked" + (", steps by AMX" if has_amx() else "") if can_pack(state.device, dtype) else "PyTorch's"
    kernels = "a server's" if server else local_kernel
    identity = from_main(state, lambda: run_identity(config, target, dtype, server) | {"kernels": kernels})
    if (main_kernel := identity["kernels"]) != kernels:
        raise UserError(f"one process multiplies by kernels {main_kernel!r}, another by {kernels!r}: use like machines")
    directory.check_run(folder, identity, config.resume)
    identity["code"] = code_version()
    done_ids, first_shard_number, seconds_spent = from_main(
        state, lambda: (directory.answered_ids(folder), directory.next_number(folder), directory.seconds_spent(folder))
    )
    shard_numbers = count(first_shard_number + state.process_index, state.num_processes)
    state.wait_for_everyone()  # all processes list the shards before a new one appears
    if state.is_main_process:
        directory.open_run(folder, identity)
    state.wait_for_everyone()

    def selects(task: Task) -> bool:
        return task.id not in done_ids and int(task.id, 16) % state.num_processes == state.process_index

    todo = read(config, target, server.context if server else context, selects)
    time_limit = TimeLimit(config.minutes, earlier=seconds_spent)
    if time_limit.is_over(seconds_spent):
        todo.tasks.clear()
    with memory_plan.explain_out_of_memory(lambda: memory_of(config, target, context)):
        responder = Responder(config, target, dtype, state.device, server) if todo.tasks else None
        token_rate = Answering(config, responder, todo, folder, shard_numbers, time_limit, state.is_main_process).run()
    state.wait_for_everyone()
    if state.is_main_process:
        _write_summary(folder, todo, token_rate)
    state.wait_for_everyone()


def _write_summary(folder: Path, todo: Todo, token_rate: float) -> None:
    """Write and print the counts over all shards. token_rate: tokens per second of this process."""
    summary: directory.Facts = {**todo.counts, **directory.summarise(folder)}
    write_json(folder / directory.SUMMARY_FILE, summary)
    flat_counts = {**summary, **{f"skipped_{reason}": count for reason, count in summary["skipped_by_reason"].items()}}
    counts_text = " ".join(f"{key}={value}" for key, value in flat_counts.items() if isinstance(value, int))
    print(f"responses out_dir={folder} {counts_text} tokens_per_second_a_process={token_rate:.0f}", flush=True)
    if summary["skipped"]:
        print(f"skipped prompts are listed in {folder}/skipped-*.jsonl", flush=True)


def batch_tasks(tasks: Iterable[Task], config: GenerateConfig) -> list[list[Task]]:
    """The tasks in batches of similar prompt lengths, ordered by hashes of prompts, so that the first answers of a run
    are to prompts of all lengths. Without `minutes` the longest come first, so that too large a batch fails at once."""
    by_length = sorted(tasks, key=lambda task: (-len(task.prompt), task.id))
    batches = [by_length[start : start + config.batch_size] for start in range(0, len(by_length), config.batch_size)]
    leading_count = 0 if config.minutes is not None else 1
    return batches[:leading_count] + sorted(batches[leading_count:], key=lambda batch: batch[0].id)


@dataclass
class Answering:
    """Answers the tasks of this process in batches, and writes its shards. If `limit` has no time for half of a batch,
    no batch begins, and the collected responses become the last shard."""

    config: GenerateConfig
    responder: Responder | None  # None: there are no tasks
    todo: Todo
    folder: Path
    shard_numbers: Iterator[int]  # of the shards that this process may write
    limit: TimeLimit
    is_main: bool  # whether this process prints, and writes seconds.json

    def __post_init__(self) -> None:
        self.limit = replace(self.limit, started=self.limit.clock())  # this run begins now
        self.shard = directory.Shard(skipped=list(self.todo.skipped))
        self.answered = self.unanswered = self.tokens = 0  # prompts, prompts, tokens of answers
        self.seconds_answered = self.seconds_saved = 0.0  # until the last answer, and the last shard
        self._has_warned = False

    def run(self) -> float:
        """Answer as many tasks as the limit allows; returns tokens per second."""
        batches, begun = batch_tasks(self.todo.tasks, self.config), 0
        with Stage("answering", len(self.todo.tasks), "prompts", estimate=self._estimate) as stage, self._saving():
            while begun < len(batches):
                end_index = begun + self._groups_together(begun)
                batch = [task for group in batches[begun:end_index] for task in group]
                begun = min(end_index, len(batches))
                self._answer(batch)
                if self.responder is not None and self.responder.refusal is not None:
                    raise self.responder.refusal
                stage.advance(len(batch))
                self._print_progress(batch, is_first=begun == 1)
                if len(self.shard) >= self.config.shard_size or self._seconds() - self.seconds_saved > SAVE_SECONDS:
                    self._save()
                is_late = bool(self.unanswered) and not self.config.server  # the batch was made smaller
                if is_late or not self.limit.holds(self.limit.spent(), self._seconds() / begun):  # seconds of a batch
                    self._print_end(is_first=begun == 1)
                    break
        if self.unanswered:
            cause = "of a server that failed or a batch too slow for minutes="
            print(f"unanswered={self.unanswered} prompts, {cause}; resume=true asks for them again", flush=True)
        return self.tokens / max(self._seconds(), 1e-9)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Context manager: write what is collected as the last shard; after an error, only with a response in it."""
        try:
            yield
        except BaseException:
            if self.shard.responses:
                self._save()
            raise
        if len(self.shard):
            self._save()

    def _groups_together(self, begun: int) -> int:
        """How many batches to answer together after `begun` batches: at most a shard, and half of the time left."""
        assert self.responder is not None
        if not begun or self.responder.by_layers is None:
            return 1
        max_batches = min(_MAX_GROUPS, (self.config.shard_size - len(self.shard)) // self.config.batch_size)
        return max(1, int(min(max_batches, self.limit.left() / max(2 * self._seconds() / begun, 1e-9))))

    def _answer(self, batch: list[Task]) -> None:
        """Answer a batch and collect its responses."""
        assert self.responder is not None
        self.responder.answer(batch, self.limit.left)
        closed_tasks = [task for task in batch if task.problem != UNANSWERED]
        self.shard.responses += [self.responder.response(task) for task in closed_tasks if task.answers]
        self.shard.skipped += [task.skip_record for task in closed_tasks if not task.answers]
        self.answered += len(closed_tasks)
        self.unanswered += len(batch) - len(closed_tasks)
        self.tokens += sum(len(answer.tokens) for task in batch for answer in task.answers)
        self.seconds_answered = self._seconds()

    def _save(self) -> None:
        """Write the collected responses as a shard."""
        self.shard.save(self.folder, next(self.shard_numbers))
        self.shard = directory.Shard()
        if self.is_main:
            write_json(self.folder / directory.SECONDS_FILE, {"seconds": self.limit.spent()})
        self.seconds_saved = self._seconds()

    def _seconds(self) -> float:
        """Seconds of this run alone."""
        return self.limit.spent() - self.limit.earlier

    def _estimate(self) -> float | None:
        """Seconds until all prompts are answered, or the time is over; None before the first batch."""
        if not self.answered:
            return None
        total = self.seconds_answered / self.answered * len(self.todo.tasks)  # the running batches have no answer yet
        return max(0.0, min(total - self._seconds(), self.limit.left()))

    def _print_progress(self, batch: list[Task], *, is_first: bool) -> None:
        """Print a warning if texts of the batch differ, once, and an estimate after the first batch."""
        if not self.is_main:
            return
        if not self._has_warned and (warning := describe_texts(batch, self.answered)):
            self._has_warned = True
            print(warning, flush=True)
        prompt_count = len(self.todo.tasks)
        if is_first and 0 < self.answered < prompt_count:
            print(describe_first(self.config, self.answered, prompt_count, self.tokens, self._seconds()), flush=True)

    def _print_end(self, *, is_first: bool) -> None:
        """Print that the time limit holds no further batch, if prompts remain."""
        prompt_count = len(self.todo.tasks)
        if self.is_main and self.answered < prompt_count:
            hint = ", which is one batch; a smaller batch_size or max_new_tokens makes it shorter" if is_first else ""
            progress = f"{self.answered} of {prompt_count} prompts are answered{hint}"
            print(f"{self.limit.minutes:.3g} minutes hold no further batch: {progress}", flush=True)


def run_identity(
    config: GenerateConfig, target: OpenTarget, dtype: torch.dtype, server: TargetServer | None = None
) -> directory.Facts:
    """The identity of a run: all that decides the answer to a prompt, last bits apart, and the prompts of a record."""
    tokenizer = bind_arguments(target.tokenizer, config.template_arguments)
    if server:  # whose weights are not read here
        model_id = {"config": deciding_config(target.source, target.revision)} if target.is_seen else target.identity
        model_facts: directory.Facts = {"served": server.model, "model": model_id}
    else:
        model_facts = {"dtype": str(dtype).removeprefix("torch."), "model": model_identity(target.files)}
    templates = [source_data.template for _, _, source_data in config.data.parts()] or [config.data.template]
    return {
        **config.decisions(),
        **model_facts,
        "end_tokens": sorted(end_tokens(target)),
        "tokenizer": tokenizer_digest(tokenizer)[:16],
        "template": [tokenizer.chat_template if template == "tokenizer" else template for template in templates],
        **({"heldout_by": HELDOUT_BY} if config.data.heldout_fraction else {}),
    }

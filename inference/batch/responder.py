"""A target that answers tasks (prompts and their answers so far), turn by turn."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict

import torch
from transformers import PreTrainedModel

from outrider.base.errors import UserError
from outrider.data_prep.text.chat import answer_text, describe_difference
from outrider.data_prep.text.documents import origin_digests
from outrider.data_prep.text.records import Written, text_digest
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget, why_not_by_layers
from outrider.draft_models.targets.proof import NotByLayersError
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.vocabulary import bind_arguments
from outrider.inference.batch.batch_decoder import Generator
from outrider.inference.batch.client import UNANSWERED
from outrider.inference.batch.directory import Facts, Response
from outrider.inference.batch.server import TargetServer
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.batch.tasks import WRITTEN_ONLY, Answer, Task, render_task, uniforms
from outrider.inference.core.sampling import Sampler
from outrider.inference.engines.cpu.recorded import can_pack, decide_by_rule
from outrider.inference.engines.packing import lay_out, pack_linears
from outrider.inference.loading.target_setup import end_tokens


class Responder:
    """Answers tasks with the target, which is loaded here or runs on a server."""

    def __init__(
        self,
        config: GenerateConfig,
        target: OpenTarget,
        dtype: torch.dtype,
        device: torch.device,
        server: TargetServer | None = None,
    ):
        self.config, self.tokenizer = config, bind_arguments(target.tokenizer, config.template_arguments)
        self.generator: Generator | TargetServer
        self.by_layers: Generator | None = None  # the generator if it runs the target by layers, so can `converse`
        if server is not None:
            self.context, self.generator = server.context, server
            return
        self.context = context_limit(target.config)
        model = load_target(config, target, dtype, device)
        self.generator = generator = Generator(
            model,
            Sampler(config.sampling),
            end_tokens(target),
            greedy_tokens=config.greedy_tokens,
            top_k_logits=config.top_k_logits,
            smallest_batch=config.smallest_batch or sys.maxsize,
        )
        self.by_layers = generator if isinstance(model, LayerStack) else None

    def answer(self, tasks: Iterable[Task], seconds_left: Callable[[], float]) -> None:
        """Answer all turns of the tasks: one turn of all tasks at a time, in padded batches or by a server. Over
        layers, `batch_size` tasks are in work: when an answer ends, its task's next turn begins, or another task.
        seconds_left: the remaining time, for which a `Generator` leaves out tasks; after such a task no task begins."""
        waiting = list(tasks)
        if not isinstance(self.generator, TargetServer):
            self.generator.seconds_left = seconds_left
        if self.by_layers is not None:
            self._converse(self.by_layers, waiting)
            return
        while waiting and not self.refusal:
            answers = self.generator.answer([task.prompt for task in waiting], [self._draws(task) for task in waiting])
            waiting = [task for task, answer in zip(waiting, answers, strict=True) if self._take(task, answer)]
        for task in waiting:
            task.problem = UNANSWERED

    @property
    def refusal(self) -> UserError | None:
        """Why the server will answer no further prompt; None if it will, and for a target that runs here."""
        return self.generator.refusal if isinstance(self.generator, TargetServer) else None

    def _converse(self, generator: Generator, tasks: Sequence[Task]) -> None:
        """`answer` over layers."""
        active_tasks, queue = list(tasks[: self.config.batch_size]), iter(tasks[self.config.batch_size :])

        def take(index: int, answer: Answer) -> tuple[Sequence[int], torch.Tensor] | None:
            """Take the answer of the task at an index; returns the next prompt and its uniform numbers, or None."""
            for late_task in queue if answer.failure == UNANSWERED else ():
                late_task.problem = UNANSWERED
            if not self._take(active_tasks[index], answer):
                if (task := next(queue, None)) is None:
                    return None
                active_tasks[index] = task
            return active_tasks[index].prompt, self._draws(active_tasks[index])

        generator.converse([task.prompt for task in active_tasks], [*map(self._draws, active_tasks)], take)

    def response(self, task: Task) -> Response:
        """The record of a task with an answer, and the target's distributions at the answers' tokens."""
        record: Facts = {"id": task.id}
        if task.messages is None:
            record |= {"text": self._text([*task.prompt, *task.answers[0].content]), "prompt_tokens": len(task.prompt)}
        else:
            record |= {"messages": task.messages, "unanswered_turns": len(task.upcoming)}
        record["tokens"] = sum(len(answer.tokens) for answer in task.answers)
        record["finish"] = "end" if task.answers[-1].ended else "length"
        record |= {"retokenised": task.retokenised, "text_differs": bool(task.difference)}
        digests = (*origin_digests(record, self.tokenizer, task.template), text_digest(record))
        record["written"] = asdict(Written(*digests, task.documents))
        return Response(record, task.top)

    def _draws(self, task: Task) -> torch.Tensor:
        max_new_tokens = min(self.config.max_new_tokens, self.context - len(task.prompt))
        return uniforms(self.config.seed, task.id, len(task.answers), max_new_tokens)

    def _take(self, task: Task, answer: Answer) -> bool:
        """Add an answer to its task; returns whether to answer the user's next turn."""
        text = answer_text(answer.content, self.tokenizer).rstrip("\ufffd").strip()
        task.problem = answer.failure or ("" if text else "empty")
        if not (task.problem or answer.ended or self.config.keep_truncated):
            task.problem = "truncated"
        if task.problem:
            if task.messages is not None:
                task.upcoming.insert(0, task.messages.pop())
            return False  # the conversation ends before the user's turn, which has no answer
        task.keep(answer)
        tokens = [*task.prompt, *answer.content]
        if task.messages is None:
            messages = [{"role": "assistant", "content": self._text(tokens)}]
            if task.template != WRITTEN_ONLY:
                task.difference = describe_difference(tokens, messages, self.tokenizer, template="none")
            return False
        decodings = (self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (task.prompt, tokens))
        prefix, full_text = map(str, decodings)
        verbatim = full_text[len(prefix) :]  # keeps a leading space, which some tokenizers drop at the begin of a text
        # The conversation has the text verbatim if the template then gives the written tokens, else stripped.
        written_ids, messages_before = task.documents[-1].ids, task.messages
        task.messages = [*messages_before, {"role": "assistant", "content": verbatim}]
        if describe_difference(written_ids, task.messages, self.tokenizer, task.template):
            task.messages = [*messages_before, {"role": "assistant", "content": text}]
            task.difference = task.difference or describe_difference(
                written_ids, task.messages, self.tokenizer, task.template
            )
        return bool(answer.ended and task.upcoming) and self._ask_next(task)

    def _ask_next(self, task: Task) -> bool:
        """Add the user's next turn; False if it cannot be answered: the conversation then ends before the turn."""
        assert task.messages is not None
        task.messages.append(task.upcoming.pop(0))
        render_task(task, self.tokenizer, self.context)
        if task.problem or len(task.prompt) >= self.context:
            task.upcoming.insert(0, task.messages.pop())
            return False
        task.difference = task.difference or describe_difference(
            task.documents[-1].ids, task.messages, self.tokenizer, task.template
        )
        return True

    def _text(self, tokens: Iterable[int]) -> str:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).rstrip("\ufffd")  # an incomplete character at the end of the budget


def load_target(
    config: GenerateConfig, target: OpenTarget, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel | LayerStack:
    """The target's layers if their passes over several texts are as fast as padded ones; else the whole model. The
    layout of the weights follows a fixed rule, so that a resumed run rounds alike. Raises `UserError`."""
    if device.type == "cpu" and config.device_map is None and why_not_by_layers(target.config) is None:
        with suppress(NotByLayersError), decide_by_rule():
            stack = target.stack(dtype=dtype, device=device, coded=True)  # quantised weights stay codes
            lay_out(stack, device)
            return stack
    model = load_causal_lm(target.source, target.revision, dtype=dtype, device_map=config.device_map)
    if config.device_map is None:
        model.to(device)  # type: ignore[arg-type]  # its stub is a decorator's
        if can_pack(device, dtype):
            pack_linears(model)
    return model.eval()

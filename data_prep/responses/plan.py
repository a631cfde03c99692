"""The plan of answers, before the target is loaded, and how long they take, after the first batch of them."""

from collections.abc import Sequence

from data_prep.responses.settings import GenerateConfig
from data_prep.responses.tasks import Task
from draft_models.targets.open_target import OpenTarget
from inference.engines.footprint import cache_bytes, weight_bytes
from inference.loading.memory_plan import GB, name_of, place_of, planned_device
from outrider.words import in_words


def describe_plan(config: GenerateConfig, target: OpenTarget, tasks: Sequence[Task], context: int) -> str:
    """The plan as text: a greppable line, then a line per part of the memory, then what bounds the answers.

    tasks: all prompts to answer. context: the target's, in tokens.
    """
    turns = sum(1 + len(task.upcoming) for task in tasks)
    longest = max((_longest(task, config, context) for task in tasks), default=0)
    said = f"plan prompts={len(tasks)} turns={turns} tokens_at_most={turns * config.max_new_tokens}"
    held = {} if config.server else _held(config, target, longest)
    lines = [f"{said} device_gb={sum(held.values()) / GB:.2f} device={config.server or planned_device()}"]
    lines += [f"  memory, {name}: {size / GB:.2f} GB" for name, size in held.items()]
    return "\n".join([*lines, f"  {_end(config)}; the first batch tells how long all prompts take"])


def describe_first(config: GenerateConfig, answered: int, prompts: int, tokens: int, seconds: float) -> str:
    """How long all prompts take by the first batch: of `answered` prompts, with so many tokens in so many seconds."""
    whole = prompts / answered
    said = f"responses first_batch={answered}/{prompts} tokens_per_s={tokens / seconds:.0f}"
    return f"{said} all_tokens={whole * tokens:.0f} all_take='{in_words(whole * seconds)}': {_end(config)}"


def describe_texts(tasks: Sequence[Task], answered: int) -> str:
    """What is odd about the texts of `tasks`, the last of so many answered ones and the first that are; else ""."""
    again, parted = sum(task.retokenised for task in tasks), [task for task in tasks if task.parted]
    said = [f"retokenised={again}/{answered}, as the server gives no token ids"] * bool(again)
    if parted:
        what = "their text gives other tokens than the target's, which are kept beside it and trained on; first"
        said.append(f"text_differs={len(parted)}/{answered}: {what} {parted[0].source}, {parted[0].parted}")
    return "\n".join(f"responses {line}" for line in said)


def _longest(task: Task, config: GenerateConfig, context: int) -> int:
    """An upper bound on the tokens of a prompt with its answers; a later turn is counted by its bytes."""
    later = sum(len(turn.encode(errors="replace")) for turn in task.upcoming)
    return min(context, len(task.prompt) + later + config.max_new_tokens * (1 + len(task.upcoming)))


def _held(config: GenerateConfig, target: OpenTarget, longest: int) -> dict[str, int]:
    """Bytes, by purpose: of one device, or of all GPUs of one process with device_map."""
    place, dtype = place_of(config, target.config, longest, planned_device())
    texts = f"keys and values of {config.batch_size} texts of up to {longest} tokens"
    return {
        f"the target's weights, {name_of(dtype)}": weight_bytes(target.config, place),
        texts: config.batch_size * cache_bytes(target.config, place),
    }


def _end(config: GenerateConfig) -> str:
    if config.minutes is not None:
        return f"minutes={config.minutes:g} end it at the latest"
    return "all are answered; minutes= would end it earlier, data.max_records= makes them fewer"

"""The answers to audit, from a file or a server.

A line of the file has a prompt, the answer, and how the answer's tokens were chosen:

    {"prompt_ids": [1, 5], "output_ids": [9, 2], "temperature": 0}        or texts: {"prompt": "Hi", "text": " there"}

The answers of a server are written to such a file batch by batch, so that a killed run can resume. The identity of a
run is everything that determines its answers. An answer is retokenised if its ids are made of its text.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from outrider.base.errors import UserError, require
from outrider.base.files import as_json_lines, read_mapping, write_atomically, write_json
from outrider.base.progress import track_progress
from outrider.base.run_dirs import check_identity
from outrider.base.settings import construct
from outrider.data_prep.text.chat import render_prompt, token_ids_up_to
from outrider.data_prep.text.data_files import RUN_FILE, read_file
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments
from outrider.inference.batch.server import TargetServer
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.batch.tasks import uniforms
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.settings.tools import OF_SERVERS, AuditConfig

ANSWERS = "answers.jsonl"
ROUNDS = 4  # requests of each connection between two writes; a killed run repeats at most this number


@dataclass(frozen=True)
class ServedAnswer(SamplingConfig):
    """A line: an answer, and how its tokens were chosen. A text without ids is tokenised when the line is read."""

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    prompt: str = ""
    text: str = ""
    retokenised: bool = False


def read_answers(file: str, target: OpenTarget) -> dict[int, ServedAnswer]:
    """The answers in a file, by line number. Raises `UserError`, naming the line, for a line without a valid answer."""
    answers_by_line = {}
    for line_number, record in read_file(Path(file)):
        try:
            answers_by_line[line_number] = with_ids(construct(ServedAnswer, record), target)
        except UserError as error:
            expected = 'expected {"prompt_ids": […], "output_ids": […], "temperature": 0}, or texts: "prompt", "text"'
            raise UserError(f"{file}:{line_number}: {error}; {expected}") from None
    require(bool(answers_by_line), "answers", file, "a file with a line for each answer")
    return answers_by_line


def with_ids(answer: ServedAnswer, target: OpenTarget) -> ServedAnswer:
    """`answer` with the ids of its texts. Raises `UserError` for unknown ids, and beyond the target's context."""
    context = context_limit(target.config)
    for key, text, ids in (("prompt", answer.prompt, answer.prompt_ids), ("text", answer.text, answer.output_ids)):
        require(not (text and ids), key, text, "a text or ids, not both")
    if answer.prompt:
        answer = replace(answer, prompt_ids=render_prompt((answer.prompt,), target.tokenizer, "none", context=context))
    if answer.text:
        answer = replace(answer, output_ids=token_ids_up_to(answer.text, target.tokenizer, context), retokenised=True)
    for key, ids in (("prompt_ids", answer.prompt_ids), ("output_ids", answer.output_ids)):
        is_valid = ids and min(ids) >= 0 and max(ids) < target.config.vocab_size
        require(bool(is_valid), key, ids[:5], f"at least one id, all less than {target.config.vocab_size}")
    length = len(answer.prompt_ids) + len(answer.output_ids)
    require(length <= context, "tokens of prompt and output", length, f"at most {context}, the target's context")
    return answer


def request_answers(
    config: AuditConfig, target: OpenTarget, eos: Collection[int], folder: Path
) -> dict[str, int | None]:
    """Request the missing answers and write all to answers.jsonl in `folder`. Returns the numbers of all prompts and of
    unanswered prompts. Raises `UserError` for a server or prompts that cannot be used, and if answers in the file were
    requested with other settings. eos: the target's end tokens."""
    answers_path, name_by_prompt = folder / ANSWERS, _names_by_prompt(config, target)
    server_options = {name: getattr(config, name) for name in OF_SERVERS if name in GenerateConfig.__dataclass_fields__}
    settings = GenerateConfig(
        target=config.target, server=config.server, seed=config.seed, data=DataConfig(), greedy_tokens=0,
        batch_size=ROUNDS * config.concurrency, **server_options,
    )  # fmt: skip
    context, vocab_size = context_limit(target.config), target.config.vocab_size
    server = TargetServer(settings, target.tokenizer, eos, context, vocab_size, checked=False)  # judged afterwards
    template, identity = ServedAnswer(**asdict(settings.sampling)), settings.decisions() | {"served": server.model}
    identity |= {KWARGS: config.chat_template_kwargs} if config.chat_template_kwargs else {}
    identity["server"] = config.server  # the server is judged, not only asked
    answers: list[ServedAnswer] = []
    if answers_path.exists():
        old_identity = read_mapping(folder / RUN_FILE, "record of what was asked", "give another out_dir")
        check_identity(old_identity, identity, folder)
        answers = [*read_answers(str(answers_path), target).values()]
    write_json(folder / RUN_FILE, identity)
    answered_prompts = {tuple(answer.prompt_ids) for answer in answers}
    open_prompts = [ids for ids in name_by_prompt if len(ids) < server.context and ids not in answered_prompts]
    for start in track_progress(range(0, len(open_prompts), settings.batch_size), "asking", "batches"):
        batch = open_prompts[start : start + settings.batch_size]
        limits = [min(config.max_new_tokens, server.context - len(ids)) for ids in batch]
        # As many numbers as the answer may have tokens, of turn 0; the server's seed is made of the first number.
        draws = [uniforms(config.seed, name_by_prompt[ids], 0, limit) for ids, limit in zip(batch, limits, strict=True)]
        for ids, reply in zip(batch, server.answer(batch, draws), strict=True):
            if reply.tokens:
                answer = replace(template, prompt_ids=[*ids], output_ids=[*reply.tokens], retokenised=reply.retokenised)
                answers.append(with_ids(answer, target))  # so that what is written can be read
        write_atomically(answers_path, as_json_lines(asdict(answer) for answer in answers))
        if server.refusal is not None:
            raise server.refusal
    require(bool(answers), "server", config.server, "one that answers a prompt; resume=true asks again")
    answered_prompts = {tuple(answer.prompt_ids) for answer in answers}
    return {"prompts": len(name_by_prompt), "unanswered": len(name_by_prompt.keys() - answered_prompts)}


def _names_by_prompt(config: AuditConfig, target: OpenTarget) -> dict[tuple[int, ...], str]:
    """The prompts' names by the token ids of their first turns."""
    name_by_prompt, tokenizer = {}, bind_arguments(target.tokenizer, config.chat_template_kwargs, config.template)
    for prompt in read_prompts(config.prompts, limit=config.num_prompts):
        ids = render_prompt(
            prompt.messages(prompt.turns[:1]), tokenizer, config.template if prompt.chat else "none",
            context=context_limit(target.config), where=f"prompt {prompt.id}",
        )  # fmt: skip
        name_by_prompt[tuple(ids)] = prompt.id
    return name_by_prompt

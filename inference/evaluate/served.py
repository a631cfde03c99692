"""The arms of an evaluation in a serving engine: plain decoding and drafting there, in turn, on the same prompts.

The engine runs in processes of its own, one without a drafter and one with, or is a server that runs already. It
continues blocks of prompts, which are stored as they are measured (`served.jsonl`), so a stopped run can be continued.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from outrider.base.errors import UserError, require
from outrider.base.files import write_atomically
from outrider.base.progress import counted
from outrider.base.streams import Streams
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.formats.convert import write_safetensors
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.formats.torch_files import CONFIG_FILE
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.model_spec import context_limit
from outrider.inference.audit.answers import ServedAnswer
from outrider.inference.audit.audit import judged, read
from outrider.inference.batch.client import ReplyError, bounded
from outrider.inference.batch.server import RETOKENISED, Json, Server, Streamed
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.drafters.ngrams.drafter import open_table
from outrider.inference.loading.drafters import context_length
from outrider.inference.loading.models import load_plain
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.measure.results import PromptResult, append_line, read_lines
from outrider.inference.measure.threads import load_average, machine_load
from outrider.inference.report.served import DRAFTED, PLAIN, UNREAD, Row, served_row
from outrider.inference.serving.engine_process import EngineProcess, generation, require_engine, running
from outrider.inference.serving.proposer import PROPOSER, chain_rounds, environment
from outrider.inference.settings.engine import MODULES, EngineConfig, draft_length, python_in, why_not
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import AUTOREGRESSIVE, MethodConfig
from outrider.inference.settings.sampling import GREEDY, SamplingConfig

FILE = "served.jsonl"
FOLDER = "engine"  # folder of drafters in the engine's format, of its logs, and of the audited texts
LEVEL = 0.001  # how often sampled texts may be refused by chance
_WARM_UP_TOKENS = 8
_TURNS = 3  # prompts in a block per concurrent request, if there are several such requests
_COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens(?:_per_pos)?)(?:_total)?(\{.*\})? (\S+)$", re.M)
Counters = Counter[str | int] | None


class EngineServer:
    """Continues prompts as an `EngineProcess` does.

    counts, of the last prompts: the rounds, and how many accepted 1, 2, … drafted tokens (vLLM's /metrics); None if
    rounds come one by one, or llama.cpp tells them; else empty.
    """

    def __init__(self, config: EngineConfig, setup: TargetSetup, option: str, drafted: int) -> None:
        """option: names its URL. drafted: the tokens of a draft, 0 without a drafter.

        Raises `UserError` for a server that is not there, does not stream, or has another model or length of drafts.
        """
        self.warm, self.option, url = 0, option, getattr(config, option)
        self.counts: tuple[int, ...] | None = None
        settings = GenerateConfig(
            target=setup.target.source, server=url, server_model=config.server_model,
            data=DataConfig(), greedy_tokens=0, temperature=config.sampling.temperature,
        )  # fmt: skip
        sizes, tokenizer = (context_limit(setup.target.config), setup.config.vocab_size), setup.tokenizer
        self._server = Server(settings, tokenizer, setup.eos, *sizes, checked=False, option=option)
        answer, *_, reply = self._server.stream(tokenizer("Hello", add_special_tokens=False)["input_ids"] or [0], 4, 0)
        owner, fingerprint = self._server.owner, str(reply.get("system_fingerprint") or "")
        self.version = fingerprint if fingerprint.startswith(owner) else f"{owner} {fingerprint}".strip()
        text, decoded = reply["choices"][0]["text"], tokenizer.decode([*answer.tokens], skip_special_tokens=True)
        same = text.strip("\ufffd ") == str(decoded).strip("\ufffd ")  # a stream may omit an incomplete character
        require(same, option, url, f"a server of {setup.target.source}: what it calls {text!r} is {decoded!r} there")
        counters = self._counters()
        length = drafted if counters is None else sum(isinstance(key, int) for key in counters)
        require(length == drafted, option, url, f"a server that drafts {drafted} tokens: this one {length}")

    def continued(
        self, prompts: Sequence[Sequence[int]], request: Json, drafted: int
    ) -> tuple[tuple[Generation, ...], float]:
        """As `EngineProcess.continued`. A chunk counts as a round, though it may hold several. Raises `UserError`."""

        def ask(prompt: Sequence[int], seed: int) -> Streamed:
            more = {**({} if request["eos"] else {"ignore_eos": True}), **request["sampling"]}
            return self._server.stream([*prompt], request["max_new_tokens"], seed % 2**31, **more)

        before, started = self._counters(), time.perf_counter()
        with ThreadPoolExecutor(request["concurrency"]) as pool:
            answers = [*pool.map(ask, prompts, request["seeds"])]
        seconds, texts = time.perf_counter() - started, tuple(_generation(answer, drafted) for answer in answers)
        self.counts = self._count(before, [reply for *_, reply in answers], drafted, texts)
        return texts, seconds

    def _counters(self) -> Counters:
        """vLLM's counters since its start, by name and by place of an accepted token; None for other servers."""
        try:
            text = self._server.client.fetch("/metrics", read=lambda response: b"".join(bounded(response)).decode())
            counters = Counter[str | int]()
            for name, labels, value in _COUNTER.findall(text):
                position = re.search(r'position="(\d+)"', labels)
                counters[int(position[1]) if position else name] += int(float(value))
        except (UserError, ReplyError, ValueError, OverflowError):  # a server need not have that page
            return None
        return counters if "vllm:" in text else None

    def _count(
        self, before: Counters, replies: Sequence[Json], drafted: int, texts: Sequence[Generation]
    ) -> tuple[int, ...] | None:
        """`counts` of the replies. Raises `UserError` for counts that contradict the texts."""
        after, n = self._counters(), sum(len(text.tokens) - 1 for text in texts)
        if before is None or after is None:
            tells = any(timing.get("draft_n") for reply in replies for _, timing in reply["timings"][:-1])
            require(drafted > 0 or not tells, self.option, self._server.client.url, "a server without a drafter")
            return None if tells else ()
        after.subtract(before)
        rounds, accepted = after["drafts"], after["accepted_tokens"]
        counts = (max(rounds, n - accepted), *(after[depth] for depth in range(drafted)))  # some without drafts
        possible = n + drafted * len(texts)  # the last round of each text may be cut off
        sound = sum(counts[1:]) == accepted and rounds + accepted <= possible and (drafted > 0 or not accepted)
        expected = f"counts that {n} tokens in drafts of {drafted} can have, and no other client meanwhile: {counts}"
        require(sound and list(counts) == sorted(counts, reverse=True), self.option, self._server.client.url, expected)
        return None if rounds == sum(len(text.rounds) for text in texts) > 0 else counts


def _generation(streamed: Streamed, drafted: int) -> Generation:
    answer, steps, times, _ = streamed
    flags = {"retokenised": answer.retokenised, UNREAD: answer.failure == RETOKENISED}
    return replace(generation(steps, times, drafted), totals={name: 1.0 for name, holds in flags.items() if holds})


Arm = EngineProcess | EngineServer


@dataclass(frozen=True)
class BlockKey:
    """The identity of a block. engine: its name, Python and options, as JSON; positions: of the block's prompts."""

    engine: str
    method: str
    concurrency: int
    repeat: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Prompts that an engine continued in both arms, without a drafter and with one.

    results: a repeat is one more turn of a prompt. seconds: by arm, of all prompts together. counts: of a server's
    drafts (see `EngineServer`). With one server only, there is one arm.
    """

    key: BlockKey
    version: str  # of the engine
    results: tuple[PromptResult, ...]
    seconds: Mapping[str, float]
    load: float | None  # of the machine, when it ended
    counts: tuple[int, ...] | None = None


def require_served(config: EngineConfig, setup: TargetSetup, prompts: int, processes: int = 1) -> None:
    """Raise `UserError` if the engine of `config` is not there, or cannot run this target on `prompts` prompts."""
    most, devices = max(config.concurrency), ("cpu",) if config.engine == "openvino" else ("cpu", "cuda")
    require(most <= prompts, "concurrency", most, f"at most {prompts}, the number of prompts")
    require(processes == 1, "engine", config.engine, f"null with {processes} processes: an engine has its own")
    processors = sorted({*setup.inherited.fields} - {"repetition_penalty"})
    require(not processors, "generation_config", processors, "none with engine=: the engine has no such processors")
    if config.engine not in MODULES:
        for method in (None, *(m for m in config.methods.values() if why_not(config.engine, m) is None)):
            _begin(config, setup, 0, Path(), "", method)
        return
    expected = f"{' or '.join(devices)} with engine={config.engine} (CUDA_VISIBLE_DEVICES chooses a GPU)"
    require(str(setup.device) in devices, "device", str(setup.device), expected)
    wrapped = setup.target.files.wrapped
    require(not wrapped, "target", setup.target.source, f"tensors without {wrapped!r} before their names with engine=")
    require_engine(config.engine, python_in(config.engine_python))


def served_methods(config: EngineConfig) -> dict[str, MethodConfig]:
    """The methods that the engine of `config` can run. Prints the others."""
    reasons = {name: why_not(config.engine, method) for name, method in config.methods.items()}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"engine={config.engine} method={name} runs=no reason={reason!r}", flush=True)
    return {name: method for name, method in config.methods.items() if reasons[name] is None}


def measure_served(
    config: EngineConfig,
    setup: TargetSetup,
    methods: Mapping[str, MethodConfig],
    rendered: Sequence[Sequence[int]],
    positions: Sequence[int],
    out: Path,
) -> list[Block]:
    """The blocks of `methods` on the prompts `positions`. Raises `UserError`."""
    folder, file = out / FOLDER, out / FILE
    by_key = {block.key: block for block in read_lines(file, Block)} if file.exists() else {}
    request, streams = _request_of(config, sampling_of(config, setup), setup.eos), Streams(config.seed).within("served")
    begin = partial(_begin, config, setup, max(map(len, rendered)) + config.max_new_tokens, folder)
    blocks = []
    with ExitStack() as open_engines:
        plain: Arm | None = None
        for name, method in methods.items():
            todo = [*block_keys(config, name, positions)]
            missing = [key for key in todo if key not in by_key]
            if missing:
                plain = plain or open_engines.enter_context(begin("plain", None))
                with begin(name, method) as drafted:
                    engines = {PLAIN: (plain, 0), DRAFTED: (drafted, draft_length(method))}
                    arms = {arm: (engine, length) for arm, (engine, length) in engines.items() if engine is not None}
                    for key in counted(missing, f"measuring {name} in {config.engine}", "blocks"):
                        by_key[key] = _measure(arms, key, rendered, request, streams)
                        append_line(file, asdict(by_key[key]))
            blocks += [by_key[key] for key in todo]
    return blocks


def block_keys(config: EngineConfig, method: str, positions: Sequence[int]) -> Iterator[BlockKey]:
    """All blocks of a method. A block has at least as many prompts as requests run at a time."""
    where = config.engine_plain or config.engine_python
    engine = json.dumps([config.engine, where, config.engine_options], sort_keys=True)
    for count in config.concurrency:
        blocks = len(positions) if count == 1 else max(1, len(positions) // (_TURNS * count))
        edges = [len(positions) * block // blocks for block in range(blocks + 1)]
        for repeat in range(config.repeats):
            for start, end in pairwise(edges):
                yield BlockKey(engine, method, count, repeat, tuple(positions[start:end]))


def _measure(
    arms: Mapping[str, tuple[Arm, int]], key: BlockKey, rendered: Sequence[Sequence[int]], shared: Row, streams: Streams
) -> Block:
    """One block, by both arms in random order; a first one with few tokens warms them up."""
    count, prompts = key.concurrency, [rendered[position] for position in key.positions]
    draws = streams.within(key.method, count, key.repeat)
    request = {**shared, "seeds": [draws.number(position, bits=56) for position in key.positions], "concurrency": count}
    texts, seconds = dict[str, tuple[Generation, ...]](), dict[str, float]()
    for arm in draws.of("order", *key.positions).sample(sorted(arms), len(arms)):
        engine, drafted = arms[arm]
        if engine.warm != count:
            limit = min(_WARM_UP_TOKENS, request["max_new_tokens"])
            engine.continued(prompts, {**request, "max_new_tokens": limit}, drafted)
            engine.warm = count
        texts[arm], seconds[arm] = engine.continued(prompts, request, drafted)
    by_method = {name: texts[arm] for arm, name in ((PLAIN, AUTOREGRESSIVE), (DRAFTED, key.method)) if arm in arms}
    results = tuple(
        PromptResult(
            f"{position}/{key.repeat}", "", tuple(prompts[i]), {name: batch[i] for name, batch in by_method.items()},
            next(iter(by_method)), conversation=str(position),
        )
        for i, position in enumerate(key.positions)
    )  # fmt: skip
    return Block(key, arms[DRAFTED][0].version, results, seconds, load_average(), arms[DRAFTED][0].counts)


def sampling_of(config: EngineConfig, setup: TargetSetup) -> SamplingConfig:
    """How tokens are chosen, the target's own repetition penalty included."""
    inherited = setup.inherited.fields.get("repetition_penalty")
    return replace(config.sampling, repetition_penalty=config.sampling.repetition_penalty or inherited)


def _request_of(config: EngineConfig, sampling: SamplingConfig, eos: Collection[int]) -> Row:
    """The engine's request for continuing prompts. Greedy decoding reads only the penalty of `sampling`."""
    read = [name for name in vars(sampling) if name != "temperature" and (sampling.temperature or "penalty" in name)]
    options = {name: getattr(sampling, name) for name in read if getattr(sampling, name) != getattr(GREEDY, name)}
    return {"max_new_tokens": config.max_new_tokens, "eos": sorted(eos), "temperature": sampling.temperature,
            "sampling": options}  # fmt: skip


def _begin(
    config: EngineConfig, setup: TargetSetup, longest: int, folder: Path, name: str, method: MethodConfig | None
) -> AbstractContextManager[Arm | None]:
    """An engine, with the drafter of `method` if it is given. None: there is no second server that does not draft."""
    if config.engine not in MODULES:
        option, length = ("engine_plain", 0) if method is None else ("engine", draft_length(method))
        return nullcontext(EngineServer(config, setup, option, length) if getattr(config, option) else None)
    draft, variables = None, {"CUDA_VISIBLE_DEVICES": ""} if setup.device.type == "cpu" else dict[str, str]()
    if method is not None:
        kind, model = KINDS[method.source], _drafter(config, setup, method, folder)
        if model == PROPOSER:
            variables |= environment(Path(str(config.where(kind))).resolve())
        draft = {"method": kind.served, "tokens": draft_length(method), "max_ngram": method.max_ngram, "model": model}
    target, revision = _weights_for_engines(setup, folder)
    job = {
        "engine": config.engine, "target": target, "revision": revision, "dtype": setup.floats,
        "device": setup.device.type, "context": min(longest + 64, context_length(setup, {})), "draft": draft,
        "options": config.engine_options, "work": str(folder.resolve()), "most": max(config.concurrency),
    }  # fmt: skip
    return running(python_in(config.engine_python), job, folder / f"{name}.log", variables)


def _weights_for_engines(setup: TargetSetup, folder: Path) -> tuple[str, str | None]:
    """(directory or Hub name, revision) of a target as engines load it: of other files it is saved as safetensors."""
    if (original := setup.target.files.original) is None:
        return setup.target.source, setup.target.revision
    target = folder.resolve() / "target"
    if not (target / CONFIG_FILE).exists():
        write_safetensors(original, target, dtype=setup.dtype, remedy="free space")
    return str(target), None


def export_drafters(config: EngineConfig, setup: TargetSetup, out: Path) -> None:
    """Write the drafters that the engine of `config` loads. Raises `UserError` for one that no engine runs."""
    (out / FOLDER).mkdir(exist_ok=True)
    for method in config.methods.values():
        if config.engine in MODULES and why_not(config.engine, method) is None:
            _drafter(config, setup, method, out / FOLDER)


def _drafter(config: EngineConfig, setup: TargetSetup, method: MethodConfig, folder: Path) -> str | None:
    """What an engine loads to draft by `method`: our module, or the directory of a drafter as engines load it."""
    kind, path = KINDS[method.source], folder.resolve() / method.source
    if (where := config.where(kind)) is None or kind.served == "custom_class":
        return where and PROPOSER
    if not path.exists():
        part = path.with_suffix(".part")  # a stopped run may have left one
        config.plugin(kind).export(where, setup.target, setup.dtype, part)
        save_parts(part, setup.tokenizer)
        part.rename(path)
    return str(path)


def _by_the_table(table: TrigramTable, most: int, result: PromptResult) -> Generation:
    """The rounds of the engine's text with the drafts of `NgramProposer`, computed from table and text."""
    text = result.generations[result.reference].tokens
    rounds = chain_rounds(table, result.prompt, text, most)
    return Generation(text, 0.0, 0.0, tuple(Round(ids, length, len(ids) - 1, length, 0.0) for length, ids in rounds))


def serve_methods(
    config: EngineConfig,
    setup: TargetSetup,
    rendered: Sequence[Sequence[int]],
    answers: Mapping[int, PromptResult],
    out: Path,
) -> dict[str, Row]:
    """Measure the methods that the engine of `config` runs: by method, its part of the report.

    answers: the results of this runtime for the first turns of prompts, by position. Raises `UserError`.
    """
    require_served(config, setup, len(answers))  # minutes= may have left prompts out
    methods, streams = served_methods(config), Streams(config.seed).within("served")
    blocks = measure_served(config, setup, methods, rendered, sorted(answers), out)
    texts = {position: answer.generations[answer.reference].tokens for position, answer in answers.items()}
    vocabulary = setup.target.vocabulary_digest, setup.target.vocabulary_size
    sections, drawn = dict[str, Row](), config.sampling.temperature > 0
    for name, method in methods.items():
        kind, rows = KINDS[method.source], []
        for count in config.concurrency:
            group = [block for block in blocks if (block.key.method, block.key.concurrency) == (name, count)]
            results = [result for block in group for result in block.results]
            here = [answers[int(str(result.conversation))].generations[name] for result in results]
            if kind.served == "custom_class":  # in this runtime it drafts trees
                table = open_table(str(config.where(kind)), *vocabulary)
                here = [_by_the_table(table, draft_length(method), result) for result in results]
            totals = {arm: sum(block.seconds[arm] for block in group) for arm in group[0].seconds}
            references = None if drawn else [texts[int(str(result.conversation))] for result in results]
            load = machine_load((), (block.load for block in group), os.cpu_count() or 1)
            row = served_row(
                name, draft_length(method), results, here, references, totals, load, streams.within(name, count),
                [(block.counts, len(block.results)) for block in group],
            )  # fmt: skip
            versions = " and ".join(sorted({block.version for block in group}))
            rows.append({"engine": versions, "options": config.engine_options, "concurrency": count, **row})
        sections[name] = {"served": rows}
    for (name, arm), judgement in _judged(config, setup, blocks, {} if drawn else texts, out).items():
        sections[name].setdefault("served_judgement", {})[arm] = judgement
    return sections


def _judged(
    config: EngineConfig, setup: TargetSetup, blocks: Sequence[Block], reference: Mapping[int, Sequence[int]], out: Path
) -> dict[tuple[str, str], Row]:
    """By method and arm, the audit of the engine's texts that differ from the `reference`; empty if none differs."""
    model, audited = None, dict[tuple[str, str], Row]()
    audits: dict[tuple[str, str], dict[tuple[tuple[int, ...], ...], Row]] = {}
    for method, result in ((block.key.method, result) for block in blocks for result in block.results):
        for name, output in result.generations.items():
            prompt, text, arm = result.prompt, output.tokens, DRAFTED if name == method else PLAIN
            if text != reference.get(int(str(result.conversation))) and UNREAD not in output.totals:
                row = {"prompt_ids": [*prompt], "output_ids": [*text], "retokenised": "retokenised" in output.totals}
                audits.setdefault((method, arm), {})[prompt, text] = row
    for (name, arm), rows in audits.items():
        sampling, file = vars(sampling_of(config, setup)), out / FOLDER / f"{name}-{arm}.jsonl"
        write_atomically(file, "".join(json.dumps({**row, **sampling}) + "\n" for row in rows.values()).encode())
        model = model or load_plain(setup.target, setup.dtype, setup.device)
        answers = {line: ServedAnswer(**row, **sampling) for line, row in enumerate(rows.values(), 1)}
        finding = judged(read(model, answers, Streams(config.seed), simulate=False), answers, LEVEL)
        faults = {"verdict": finding.verdict, "faults": list(finding.faults)}
        audited[name, arm] = {"texts": len(rows), "file": f"{FOLDER}/{file.name}", **faults}
    return audited

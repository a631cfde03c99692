"""Settings of the pipeline: which commands it runs, in which order, with which options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from outrider.base.errors import require, require_choice
from outrider.base.run_dirs import rehearsal_folder
from outrider.base.settings import Positive, RunConfig, free, opt
from outrider.draft_models.targets.settings import EAGLE3, SMALL_LM, Model

ROOT = Path(__file__).resolve().parent.parent
HERE = "{out_dir}"  # in a step's options: the pipeline's own directory
REPOSITORY = "{repository}"  # in a step's options: the directory of this project
TARGET = "{target}"  # in a step's options: the target, which `target` names or one of MAKERS provides
MAKERS = ("target", "fetch")  # the steps that can provide the target
Options = Mapping[str, object]  # of a command: values by dotted key


@dataclass(frozen=True)
class PipelineStep:
    """A command of this project as one step of the pipeline.

    product: the file it writes last, relative to the pipeline's directory. links: the options that locate the target
    and the products of earlier steps; links to omitted steps are dropped. after: earlier steps that write into another
    step's directory, which this step reads.
    """

    script: str
    product: str
    links: Options = field(default_factory=dict)
    after: tuple[str, ...] = ()


_OF_TARGET = {"target": TARGET}
_OF_EESD = {"checkpoint": f"{HERE}/eesd"}
_OF_DRAFTERS = {**_OF_EESD, EAGLE3: f"{HERE}/eagle3", SMALL_LM: f"{HERE}/small_lm", "table": f"{HERE}/trigrams"}
STEPS = {
    "target": PipelineStep("train/toy_target.py", "target/toy_target.json"),
    "fetch": PipelineStep("data_prep/fetch_target.py", "fetch/fetched.json"),
    "prompts": PipelineStep("data_prep/write_prompts.py", "prompts/prompts.json"),
    "responses": PipelineStep("data_prep/generate_responses.py", "responses/summary.json", _OF_TARGET),
    "eesd": PipelineStep("train/eesd.py", "eesd/drafter.json", _OF_TARGET),
    "calibrate": PipelineStep("train/calibrate.py", "calibrate/calibration.json", _OF_EESD),
    EAGLE3: PipelineStep("train/eagle3.py", "eagle3/eagle3.json", _OF_TARGET),
    SMALL_LM: PipelineStep("train/finetune_drafter.py", "small_lm/finetune_drafter.json", _OF_TARGET),
    "trigrams": PipelineStep("data_prep/build_trigrams.py", "trigrams/table.safetensors", {"tokenizer": TARGET}),
    # calibrate's head lies in the directory of the early exit
    "report": PipelineStep("inference/evaluate_checkpoint.py", "report/report.json", _OF_DRAFTERS, ("calibrate",)),
}
LOGS = "logs"  # <step>.log: its output; .json: its record; .settings.json: what its command ran with
OWN = ("out_dir", "resume")  # options of every step that the pipeline sets itself
TIME = "minutes"  # the commands' option for their time limit
BACK = "~"  # the value of an option that is taken back


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(RunConfig):
    """The whole mission: a target, drafters for it, and one comparison of all of them.

    Each step is a command of this project, run by itself with out_dir=<out_dir>/<step>; see `STEPS`.
    """

    leaves: ClassVar[tuple[str, ...]] = (LOGS,)
    steps: dict[str, dict[str, object]] = opt(factory=dict)
    """the options of each step's command, as an experiment gives them: {eesd: {exit_layer: 3, fit.steps: 900}}; a step
    that is missing is left out (~steps.NAME)"""
    more: dict[str, dict[str, object]] = opt(factory=dict)
    """your options of the steps, given as steps.eesd.fit.steps=900; ~steps.eesd.fit.steps takes one back"""
    expected_minutes: dict[str, Positive] = free(factory=dict)
    """minutes of each step on the experiment's machine, from which the time left is estimated"""
    target: Model | None = None
    """model directory, GGUF file or Hub name, in place of the steps target and fetch; null: the product of the step
    target or fetch, whichever runs"""
    out_dir: str = free("runs/pipeline", "where everything goes")
    minutes: Positive | None = None
    """minutes of all steps together, on the experiment's machine (two CPU cores if it names none): scales the minutes
    of the experiment's steps in proportion; null: as in the experiment"""
    debug: bool = free(False, "a rehearsal in <out_dir>-debug: the same commands, everything small")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.steps), "steps", list(self.steps), "at least one step; choose an experiment, or see STEPS")
        for choices, steps in ((STEPS, self.steps), (self.steps, self.more)):
            for name, options in steps.items():
                require_choice("steps", name, tuple(choices))
                for key in options:
                    require(key not in OWN, f"steps.{name}", key, f"none of {', '.join(OWN)}: the pipeline gives them")
        two_targets = set(MAKERS) <= set(self.steps)
        require(not two_targets, "steps", list(self.steps), f"one of {', '.join(MAKERS)}: a pipeline has one target")
        if self.minutes is not None:
            self._share_out(self.minutes)

    def _share_out(self, minutes: float) -> None:
        """Scale the steps' minutes in proportion, so that all steps together take `minutes`."""
        unknown = [name for name in self.to_do if name not in self.expected_minutes]
        require(not unknown, "minutes", minutes, f"null: how long {', '.join(unknown)} will take is not known")
        require(not self.debug, "minutes", minutes, "null with debug=true, where everything is small already")
        limited = sum(map(self.limit, self.to_do))
        untimed = sum(self.expected_minutes[name] for name in self.to_do) - limited
        require(minutes > untimed, "minutes", minutes, f"more than the {untimed:.1f} of loading, counting and saving")
        require(limited > 0, "minutes", minutes, "null: no step of the experiment has minutes that could change")
        share, steps, expected = (minutes - untimed) / limited, {**self.steps}, {**self.expected_minutes}
        for name in filter(self.limit, self.to_do):
            steps[name] = {**self.steps[name], TIME: float(f"{share * self.limit(name):.3g}")}
            expected[name] += (share - 1) * self.limit(name)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "expected_minutes", expected)

    def limit(self, name: str) -> float:
        """The minutes that the experiment gives step `name`; 0 if it gives none."""
        minutes = self.steps[name].get(TIME)
        return float(minutes) if isinstance(minutes, int | float) else 0.0

    @property
    def folder(self) -> Path:
        """Where everything goes, also in a rehearsal."""
        return rehearsal_folder(self.out_dir) if self.debug else Path(self.out_dir)

    @property
    def to_do(self) -> list[str]:
        """The steps that run, in order."""
        left_out = MAKERS if self.target else ()
        return [name for name in STEPS if name in self.steps and name not in left_out]

    def options(self, name: str) -> dict[str, object]:
        """The options of step `name`, with placeholders `HERE` and `REPOSITORY`, and without `OWN`."""
        target = self.target or f"{HERE}/{'fetch' if 'fetch' in self.steps else 'target'}"
        unread = {f"{HERE}/{step}" for step in STEPS if step not in self.steps}
        links = {key: path for key, path in STEPS[name].links.items() if path not in unread}
        options = {**links, **self.steps[name], **self.more.get(name, {})}
        return {key: _filled(value, {TARGET: target}) for key, value in options.items() if value != BACK}

    def sources(self, name: str) -> list[str]:
        """The steps to do whose products step `name` reads."""
        options = str(self.options(name))
        return [step for step in self.to_do if f"{HERE}/{step}" in options or step in STEPS[name].after]

    def arguments(self, name: str) -> dict[str, object]:
        """All options with which the command of step `name` runs."""
        texts = {HERE: str(self.folder), REPOSITORY: str(ROOT)}
        options = {key: _filled(value, texts) for key, value in self.options(name).items()}
        return {**options, "out_dir": str(self.folder / name), "resume": True}


def _filled(value: object, replacements: Mapping[str, str]) -> object:
    """The value of an option with the placeholders in its texts replaced by `replacements`."""
    if isinstance(value, Mapping):
        return {key: _filled(inner, replacements) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(inner, replacements) for inner in value]
    if isinstance(value, str):
        for placeholder, text in replacements.items():
            value = value.replace(placeholder, text)
    return value

"""Config of the pipeline: which commands it runs, in which order, with which options."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.base.errors import require, require_choice
from outrider.base.settings import Positive, RunConfig, Settings, free, opt
from outrider.base.words import quoted
from outrider.draft_models.targets.settings import EAGLE3, SMALL_LM, Model

ROOT = Path(__file__).resolve().parent.parent
HERE = "{out_dir}"  # in a step's options: the pipeline's own directory
REPOSITORY = "{repository}"  # in a step's options: the directory of this project
TARGET = "{target}"  # in a step's options: the target, which `target` names or one of MAKERS provides
MAKERS = ("target", "fetch")  # the steps that can provide the target
_PLACE = re.compile(r"\{(?:out_dir|repository|target)\}")
_VALUE = re.compile(r"""(['"])(.*?)\1|[^\s'",[\]](?:[^'",[\]]*[^\s'",[\]])?""")  # an option's, or one in its list


@dataclass(frozen=True)
class PipelineStep:
    """A command of this project as one step of the pipeline.

    product: the file it writes last, relative to the pipeline's directory. after: the steps whose products it reads.
    links: the options that locate these products; links to omitted steps are dropped.
    """

    script: str
    product: str
    after: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def read_links(self, steps: Collection[str]) -> list[str]:
        """The links to the products of `steps`, and to the target."""
        unread = {f"{HERE}/{name}" for name in self.after if name not in steps}
        return [link for link in self.links if link.partition("=")[2] not in unread]


_ANSWERED, _OF_TARGET = (*MAKERS, "responses"), ("target={target}",)
STEPS = {
    "target": PipelineStep("train/toy_target.py", "target/toy_target.json"),
    "fetch": PipelineStep("data_prep/fetch_target.py", "fetch/fetched.json"),
    "prompts": PipelineStep("data_prep/write_prompts.py", "prompts/prompts.json"),
    "responses": PipelineStep(
        "data_prep/generate_responses.py", "responses/summary.json", (*MAKERS, "prompts"), _OF_TARGET
    ),
    "eesd": PipelineStep("train/eesd.py", "eesd/drafter.json", _ANSWERED, _OF_TARGET),
    "calibrate": PipelineStep(
        "train/calibrate.py", "calibrate/calibration.json", (*_ANSWERED, "eesd"), ("checkpoint={out_dir}/eesd",)
    ),
    EAGLE3: PipelineStep("train/eagle3.py", "eagle3/eagle3.json", _ANSWERED, _OF_TARGET),
    SMALL_LM: PipelineStep("train/finetune_drafter.py", "small_lm/finetune_drafter.json", _ANSWERED, _OF_TARGET),
    "trigrams": PipelineStep(
        "data_prep/build_trigrams.py", "trigrams/table.safetensors", _ANSWERED, ("tokenizer={target}",)
    ),
    "report": PipelineStep(
        "inference/evaluate_checkpoint.py",
        "report/report.json",
        (*MAKERS, "prompts", "eesd", "calibrate", EAGLE3, SMALL_LM, "trigrams"),
        (
            "checkpoint={out_dir}/eesd",
            "eagle3={out_dir}/eagle3",
            "small_lm={out_dir}/small_lm",
            "table={out_dir}/trigrams",
        ),
    ),
}
OWN = ("out_dir", "resume")  # options of every step that the pipeline sets itself
TIME = "minutes"  # the commands' option for their time limit


@dataclass(frozen=True)
class StepConfig(Settings):
    """The options of one step, as on its command line.

    A later one replaces an earlier one of the same key, and ~KEY takes it back.
    """

    overrides: list[str] = opt(factory=list, help="what an experiment says")
    more: list[str] = field(default_factory=list)
    """what you say: 'steps.eesd.more=["fit.steps=900","exit_layer=3"]'"""
    expected_minutes: Positive | None = free(None, "on the experiment's machine; null: unknown. Tells the time left")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("overrides", "more"):
            for option in getattr(self, name):
                given = "=" in option or option.startswith("~")
                require(given, name, option, "KEY=VALUE, an option of the step's command")
                require(key_of(option) not in OWN, name, option, f"none of {', '.join(OWN)}: the pipeline gives them")

    @property
    def minutes(self) -> float:
        """The command's time limit according to its experiment; 0 if that sets none."""
        given = [option.partition("=")[2] for option in self.overrides if key_of(option) == TIME]
        return float(given[-1]) if given and given[-1] != "null" else 0.0


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(RunConfig):
    """The whole mission: a target, drafters for it, and one comparison of all of them.

    Each step is a command of this project, run by itself with out_dir=<out_dir>/<step>; see `STEPS`.
    """

    steps: dict[str, StepConfig] = opt(factory=dict, help="a missing one is left out (~steps.NAME)")
    target: Model | None = None
    """model directory, GGUF file or Hub name; null: what step target or fetch leaves, which are passed over where it is
    given"""
    out_dir: str = free("runs/pipeline", "where everything goes")
    minutes: Positive | None = None
    """what all steps together may take on the experiment's machine, two CPU cores if it names none: it shortens or
    lengthens the minutes that the experiment gives them, all in proportion; null: as the experiment says"""
    debug: bool = free(False, "a rehearsal in <out_dir>-debug: the same commands, everything small")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.steps), "steps", list(self.steps), "at least one step; choose an experiment, or see STEPS")
        for name in self.steps:
            require_choice("steps", name, tuple(STEPS))
        both = set(MAKERS) <= set(self.steps)
        require(not both, "steps", list(self.steps), f"one of {', '.join(MAKERS)}: a pipeline has one target")
        if self.minutes is not None:
            self._check_minutes(self.minutes)

    def _check_minutes(self, minutes: float) -> None:
        unknown = [name for name in self.to_do if self.steps[name].expected_minutes is None]
        require(not unknown, "minutes", minutes, f"null: how long {', '.join(unknown)} will take is not known")
        require(not self.debug, "minutes", minutes, "null with debug=true, where everything is small already")
        least = self._untimed
        require(minutes > least, "minutes", minutes, f"more than the {least:.1f} of loading, counting and saving")
        given = any(self.steps[name].minutes for name in self.to_do)
        require(given, "minutes", minutes, "null: no step of the experiment has minutes that could change")

    @property
    def _untimed(self) -> float:
        """Minutes that the steps take in addition to their time limits."""
        return sum((self.steps[name].expected_minutes or 0) - self.steps[name].minutes for name in self.to_do)

    @property
    def _share(self) -> float:
        """The factor on the time limit that a step has in its experiment."""
        if self.minutes is None:
            return 1.0
        return (self.minutes - self._untimed) / sum(self.steps[name].minutes for name in self.to_do)

    def expected_minutes(self, name: str) -> float | None:
        """The minutes that step `name` is expected to take on the experiment's machine; None if unknown."""
        step = self.steps[name]
        return step.expected_minutes and step.expected_minutes - (1 - self._share) * step.minutes

    @property
    def to_do(self) -> list[str]:
        """The steps that run, in order."""
        left_out = MAKERS if self.target else ()
        return [name for name in STEPS if name in self.steps and name not in left_out]

    def options(self, name: str) -> list[str]:
        """The command line of step `name`, with placeholders `HERE` and `REPOSITORY`, and without `OWN`."""
        step = self.steps[name]
        target = self.target or f"{HERE}/{'fetch' if 'fetch' in self.steps else 'target'}"
        timed = [f"{TIME}={self._share * step.minutes:.3g}"] if self.minutes is not None and step.minutes else []
        given = [*STEPS[name].read_links(self.steps), *step.overrides, *timed]
        kept: dict[str, str] = {}
        for option in [*given, *step.more]:
            if option.startswith("~") and key_of(option) in kept:
                del kept[key_of(option)]
            else:
                kept[key_of(option)] = option
        return [_filled(option, {TARGET: target}) for option in kept.values()]

    def placed(self, options: Sequence[str]) -> list[str]:
        """`options` of a step with `HERE` and `REPOSITORY` replaced by their directories."""
        return [_filled(option, {HERE: self.out_dir, REPOSITORY: str(ROOT)}) for option in options]


def _filled(option: str, places: Mapping[str, str]) -> str:
    """`option` with its placeholders replaced by `places`. A value with a placeholder is always a string."""

    def fill(value: re.Match[str]) -> str:
        given, quote = value[2] or value[0], value[1] or ""
        text = _PLACE.sub(lambda place: places.get(place[0], place[0]), given)
        later = _PLACE.search(text)
        return value[0] if text == given else f"{quote}{text}{quote}" if later else quoted(text)

    key, equals, values = option.partition("=")
    return key + equals + _VALUE.sub(fill, values)


def key_of(option: str) -> str:
    """The key of a Hydra override: `a.b` of `a.b=1`, `+a.b=1` and `~a.b`."""
    return option.partition("=")[0].lstrip("+~")

"""Settings of the pipeline: which commands it runs, in which order, with which options."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outrider.base.errors import UserError, require, require_choice
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

    product: the file it writes last, relative to the pipeline's directory. after: the steps whose products it reads.
    links: the options that locate these products; links to omitted steps are dropped.
    """

    script: str
    product: str
    after: tuple[str, ...] = ()
    links: Options = field(default_factory=dict)

    def read_links(self, steps: Collection[str]) -> dict[str, object]:
        """The links to the products of `steps`, and to the target."""
        unread = {f"{HERE}/{name}" for name in self.after if name not in steps}
        return {key: place for key, place in self.links.items() if place not in unread}


_ANSWERED, _OF_TARGET = (*MAKERS, "responses"), {"target": TARGET}
STEPS = {
    "target": PipelineStep("train/toy_target.py", "target/toy_target.json"),
    "fetch": PipelineStep("data_prep/fetch_target.py", "fetch/fetched.json"),
    "prompts": PipelineStep("data_prep/write_prompts.py", "prompts/prompts.json"),
    "responses": PipelineStep(
        "data_prep/generate_responses.py", "responses/summary.json", (*MAKERS, "prompts"), _OF_TARGET
    ),
    "eesd": PipelineStep("train/eesd.py", "eesd/drafter.json", _ANSWERED, _OF_TARGET),
    "calibrate": PipelineStep(
        "train/calibrate.py", "calibrate/calibration.json", (*_ANSWERED, "eesd"), {"checkpoint": "{out_dir}/eesd"}
    ),
    EAGLE3: PipelineStep("train/eagle3.py", "eagle3/eagle3.json", _ANSWERED, _OF_TARGET),
    SMALL_LM: PipelineStep("train/finetune_drafter.py", "small_lm/finetune_drafter.json", _ANSWERED, _OF_TARGET),
    "trigrams": PipelineStep(
        "data_prep/build_trigrams.py", "trigrams/table.safetensors", _ANSWERED, {"tokenizer": TARGET}
    ),
    "report": PipelineStep(
        "inference/evaluate_checkpoint.py",
        "report/report.json",
        (*MAKERS, "prompts", "eesd", "calibrate", EAGLE3, SMALL_LM, "trigrams"),
        {
            "checkpoint": "{out_dir}/eesd",
            EAGLE3: "{out_dir}/eagle3",
            SMALL_LM: "{out_dir}/small_lm",
            "table": "{out_dir}/trigrams",
        },
    ),
}
OWN = ("out_dir", "resume")  # options of every step that the pipeline sets itself
TIME = "minutes"  # the commands' option for their time limit
BACK = "~"  # the value of an option that is taken back
_FORMER = ("overrides", "more", "expected_minutes")  # what a step consisted of when its options were words


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(RunConfig):
    """The whole mission: a target, drafters for it, and one comparison of all of them.

    Each step is a command of this project, run by itself with out_dir=<out_dir>/<step>; see `STEPS`.
    """

    steps: dict[str, dict[str, object]] = opt(factory=dict)
    """the options of each step's command, as an experiment gives them: {eesd: {exit_layer: 3, fit.steps: 900}}; a step
    that is missing is left out (~steps.NAME)"""
    more: dict[str, dict[str, object]] = opt(factory=dict)
    """your options of the steps, given as steps.eesd.fit.steps=900; ~steps.eesd.fit.steps takes one back"""
    expected_minutes: dict[str, Positive] = free(factory=dict)
    """of each step, on the experiment's machine; they tell the time left"""
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
        for known, given in ((STEPS, self.steps), (self.steps, self.more)):
            for name, options in given.items():
                require_choice("steps", name, tuple(known))
                _check_options(name, options)
        both = set(MAKERS) <= set(self.steps)
        require(not both, "steps", list(self.steps), f"one of {', '.join(MAKERS)}: a pipeline has one target")
        if self.minutes is not None:
            self._check_minutes(self.minutes)

    def _check_minutes(self, minutes: float) -> None:
        unknown = [name for name in self.to_do if name not in self.expected_minutes]
        require(not unknown, "minutes", minutes, f"null: how long {', '.join(unknown)} will take is not known")
        require(not self.debug, "minutes", minutes, "null with debug=true, where everything is small already")
        least = self._untimed
        require(minutes > least, "minutes", minutes, f"more than the {least:.1f} of loading, counting and saving")
        given = any(map(self.limit, self.to_do))
        require(given, "minutes", minutes, "null: no step of the experiment has minutes that could change")

    def limit(self, name: str) -> float:
        """The minutes that the experiment gives step `name`; 0 if it gives none."""
        minutes = self.steps[name].get(TIME)
        return float(minutes) if isinstance(minutes, int | float) else 0.0

    @property
    def _untimed(self) -> float:
        """Minutes that the steps take in addition to their time limits."""
        return sum(self.expected_minutes.get(name, 0) - self.limit(name) for name in self.to_do)

    @property
    def _share(self) -> float:
        """The factor on the time limit that a step has in its experiment."""
        return 1.0 if self.minutes is None else (self.minutes - self._untimed) / sum(map(self.limit, self.to_do))

    def expected(self, name: str) -> float | None:
        """The minutes that step `name` is expected to take on the experiment's machine; None if unknown."""
        known = self.expected_minutes.get(name)
        return known and known - (1 - self._share) * self.limit(name)

    @property
    def to_do(self) -> list[str]:
        """The steps that run, in order."""
        left_out = MAKERS if self.target else ()
        return [name for name in STEPS if name in self.steps and name not in left_out]

    def options(self, name: str) -> dict[str, object]:
        """The options of step `name`, with placeholders `HERE` and `REPOSITORY`, and without `OWN`."""
        target = self.target or f"{HERE}/{'fetch' if 'fetch' in self.steps else 'target'}"
        given = {**STEPS[name].read_links(self.steps), **self.steps[name]}
        if self.minutes is not None and self.limit(name):
            given[TIME] = float(f"{self._share * self.limit(name):.3g}")
        given |= self.more.get(name, {})
        return {key: _filled(value, {TARGET: target}) for key, value in given.items() if value != BACK}

    def placed(self, name: str) -> dict[str, object]:
        """All options with which the command of step `name` runs."""
        places = {HERE: self.out_dir, REPOSITORY: str(ROOT)}
        options = {key: _filled(value, places) for key, value in self.options(name).items()}
        return {**options, "out_dir": str(Path(self.out_dir) / name), "resume": True}


def _check_options(name: str, options: Options) -> None:
    for key in options:
        if key in _FORMER:
            raise UserError(
                f"steps.{name}.{key}: a step is a mapping of its command's options now, in YAML as {name}: "
                f"{{fit.steps: 900}} and on a command line as steps.{name}.fit.steps=900; the minutes that it is "
                f"expected to take are expected_minutes.{name}"
            )
        require(key not in OWN, f"steps.{name}", key, f"none of {', '.join(OWN)}: the pipeline gives them")


def _filled(value: object, places: Mapping[str, str]) -> object:
    """The value of an option with the placeholders in its texts replaced by `places`."""
    if isinstance(value, Mapping):
        return {key: _filled(one, places) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(one, places) for one in value]
    if not isinstance(value, str):
        return value
    for place, path in places.items():
        value = value.replace(place, path)
    return value

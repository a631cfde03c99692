"""Settings of the pipeline: its steps, their options, their minutes. Light: a mistake shows before torch loads.

An experiment is a file of the pipeline's options in conf/. A field by `free` affects no result, other fields do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from outrider.base.errors import require
from outrider.base.run_dirs import rehearsal_folder
from outrider.base.settings import Positive, RunConfig, free, opt
from outrider.draft_models.targets.settings import EAGLE3, SMALL_LM, TARGET, Model

TARGET_STEPS = ("target", "fetch")  # either provides the target
CORPUS_LM, CORPUS_TABLE = "corpus_lm", "corpus_table"  # from a corpus, before the target's answers are added
LOGS = "logs"  # in out_dir. <step>.log: its output; .json: its record; .settings.json: the settings of its command
MINUTES = "minutes"  # the option of a command for its time limit
REMOVED = "~"  # the value in `more` of an option that is taken back
_SET_BY_PIPELINE = ("out_dir", "resume")
Options = Mapping[str, object]  # of a command: values by dotted key


@dataclass(frozen=True)
class StepCommand:
    """The command of a step: its script, the file that it writes last, and its options that name other steps' products.

    links: by option, the product: a step's directory, or a file in it. `TARGET` stands for the pipeline's target.
    """

    script: str
    product: str
    links: Mapping[str, str]


_DRAFTERS = {"checkpoint": "eesd", EAGLE3: EAGLE3, SMALL_LM: SMALL_LM, "table": "trigrams"}  # of the report
STEPS: Mapping[str, StepCommand] = {  # in the order in which they run
    "target": StepCommand("train/toy_target.py", "toy_target.json", {}),
    "fetch": StepCommand("data_prep/fetch_target.py", "fetched.json", {}),
    "prompts": StepCommand("data_prep/write_prompts.py", "prompts.json", {"target": TARGET}),
    "responses": StepCommand("data_prep/generate_responses.py", "summary.json",
                             {"target": TARGET, "data.path": "prompts/train.jsonl"}),
    "heldout": StepCommand("data_prep/generate_responses.py", "summary.json",
                           {"target": TARGET, "data.path": "prompts/heldout.jsonl"}),
    "eesd": StepCommand("train/eesd.py", "drafter.json", {"target": TARGET}),
    "calibrate": StepCommand("train/calibrate.py", "calibration.json", {"checkpoint": "eesd"}),
    EAGLE3: StepCommand("train/eagle3.py", "eagle3.json", {"target": TARGET}),
    CORPUS_LM: StepCommand("train/finetune_drafter.py", "finetune_drafter.json", {"tokenizer": TARGET}),
    SMALL_LM: StepCommand("train/finetune_drafter.py", "finetune_drafter.json",
                          {"target": TARGET, "drafter.path": CORPUS_LM}),
    CORPUS_TABLE: StepCommand("data_prep/build_trigrams.py", "table.safetensors", {"tokenizer": TARGET}),
    "trigrams": StepCommand("data_prep/build_trigrams.py", "table.safetensors",
                            {"tokenizer": TARGET, "merge": CORPUS_TABLE}),
    "report": StepCommand("inference/evaluate_checkpoint.py", "report.json",
                          {"target": TARGET, "prompts": "prompts/heldout.jsonl", **_DRAFTERS}),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(RunConfig):
    """The whole mission: a target, drafters for it, and one comparison of all of them.

    Each step is a command of this project, run by itself with out_dir=<out_dir>/<step>; see `pipeline_run`.
    """

    run_files: ClassVar[tuple[str, ...]] = (LOGS,)
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

    def check_fields(self) -> None:  # runs after those of the bases
        require(bool(self.steps), "steps", list(self.steps), "at least one step; choose an experiment, or see STEPS")
        for allowed_steps, step_options in ((STEPS, self.steps), (self.steps, self.more)):
            for name, options in step_options.items():
                require(name in allowed_steps, "steps", name, f"one of {', '.join(allowed_steps)}")
                for key in options:
                    expected = f"none of {', '.join(_SET_BY_PIPELINE)}: the pipeline gives them"
                    require(key not in _SET_BY_PIPELINE, f"steps.{name}", key, expected)
        has_two_targets = set(TARGET_STEPS) <= set(self.steps)
        expected = f"one of {', '.join(TARGET_STEPS)}: a pipeline has one target"
        require(not has_two_targets, "steps", list(self.steps), expected)
        self._time_scale()  # raises `UserError` for minutes that cannot be kept

    @property
    def folder(self) -> Path:
        """Where everything goes, also in a rehearsal."""
        return rehearsal_folder(self.out_dir) if self.debug else Path(self.out_dir)

    @property
    def to_do(self) -> list[str]:
        """The names of the steps that run, in order."""
        return [name for name in STEPS if name in self.steps and not (self.target and name in TARGET_STEPS)]

    def scaled_minutes(self, step_name: str) -> float:
        """The minutes that the experiment gives a step, scaled for `minutes`; 0 if it gives none."""
        minutes = self._time_scale() * self._written_limit(step_name)
        return minutes if self.minutes is None else float(f"{minutes:.3g}")

    def estimate_minutes(self, step_name: str) -> float | None:
        """The minutes that a step takes with its limit; None if unknown."""
        minutes = None if self.debug else self.expected_minutes.get(step_name)
        return minutes and minutes + (self._time_scale() - 1) * self._written_limit(step_name)

    def _written_limit(self, step_name: str) -> float:
        """The minutes that the experiment gives a step; 0 if it gives none."""
        minutes = self.steps[step_name].get(MINUTES)
        return float(minutes) if isinstance(minutes, int | float) else 0.0

    def _time_scale(self) -> float:
        """The factor of limits with which all steps together take `minutes`. Raises `UserError` if there is none."""
        if self.minutes is None:
            return 1.0
        unknown_steps = [name for name in self.to_do if name not in self.expected_minutes]
        self.require(MINUTES, not unknown_steps, f"null: how long {', '.join(unknown_steps)} will take is not known")
        self.require(MINUTES, not self.debug, "null with debug=true, where everything is small already")
        limited_minutes = sum(map(self._written_limit, self.to_do))
        overhead = sum(self.expected_minutes[name] for name in self.to_do) - limited_minutes
        self.require(MINUTES, self.minutes > overhead, f"more than the {overhead:.1f} of loading, counting and saving")
        self.require(MINUTES, limited_minutes > 0, "null: no step of the experiment has minutes that could change")
        return (self.minutes - overhead) / limited_minutes

"""Settings of forecast; a field by `free` affects no result. Light: a mistake shows before torch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from outrider.base.errors import require
from outrider.base.settings import Count, Positive, RunConfig, free, opt
from outrider.data_prep.text.settings import PromptFile, PromptTemplate, TemplateArguments
from outrider.draft_models.targets.settings import Model, RunDtype
from outrider.inference.settings.kinds import NGRAMS
from outrider.train.settings.auto import TRAINABLE

FORECAST_FILE, TRAININGS = "forecast.json", "trainings"  # in out_dir
# By kind of drafter, the step of a pipeline that makes it, and the method that is measured with it.
FORECAST_KINDS: Mapping[str, tuple[str, str]] = {
    NGRAMS.name: ("trigrams", NGRAMS.name),
    **{name: (kind.step, kind.methods[0]) for name, kind in TRAINABLE.items()},
}


@dataclass(frozen=True, kw_only=True)
class ForecastConfig(RunConfig):
    """forecast: what drafters will gain after longer trainings, from short ones."""

    run_files: ClassVar[tuple[str, ...]] = (FORECAST_FILE, TRAININGS)
    target: Model = free(help="model directory, GGUF file or Hub name")
    answers: str = opt(help="the target's answers, of generate-responses: a file, or a pattern of several")
    prompts: PromptFile = opt(help="prompts on which all is measured, and that no answer is to")
    kinds: tuple[str, ...] = opt((NGRAMS.name, "small_lm"), f"of {', '.join(FORECAST_KINDS)}")
    minutes: Positive = opt(30.0, "of the training that is forecast, of each kind, on all answers")
    shares: tuple[Annotated[float, Gt(0), Lt(1)], ...] = opt((1 / 16, 1 / 8, 1 / 4))
    """of the minutes and of the answers: the sizes of the short trainings"""
    num_prompts: Annotated[int, Ge(5)] = opt(12, "that are measured after each training")
    max_new_tokens: Count = opt(64, "of each of them")
    template: PromptTemplate = opt("auto", "of prompts, as for auto")
    chat_template_kwargs: TemplateArguments = opt(factory=dict, help="what the chat template reads besides, by name")
    dtype: RunDtype = opt("fast", "of the target, as for evaluate-checkpoint")
    outcome: bool = free(False, "train for all minutes too, and record how the forecast did")
    out_dir: str = free("runs/forecast", "where everything goes")

    def check_fields(self) -> None:  # runs after those of the bases
        is_distinct = bool(self.kinds) and len({*self.kinds}) == len(self.kinds)
        self.require("kinds", is_distinct, "each kind once, at least one")
        for kind in self.kinds:
            require(kind in FORECAST_KINDS, "kinds", kind, f"one of {', '.join(FORECAST_KINDS)}")
        is_ascending = len(self.shares) > 1 and [*self.shares] == sorted({*self.shares})
        self.require("shares", is_ascending, "two or more, each more than the one before")

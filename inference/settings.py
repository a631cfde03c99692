"""Settings of the runtime and of evaluate-checkpoint."""

from dataclasses import dataclass, field

from draft_models.errors import require, require_choice

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class MethodConfig:
    """One way of decoding: when to stop drafting, and the bounds of a draft."""

    stop: str = "beta"  # beta (Thompson sampling, EESD) | fixed
    max_draft: int = 8  # drafted tokens per round at most; stop=fixed drafts exactly this many
    alpha: float = 4.0  # stop=beta: the prior, as successes …
    beta: float = 2.0  # … and failures already seen
    update: str = "natural"  # stop=beta: natural | printed (see inference/stop_rules.py)

    def __post_init__(self) -> None:
        require_choice("stop", self.stop, ("beta", "fixed"))
        require_choice("update", self.update, ("natural", "printed"))
        require(self.max_draft >= 1, "max_draft", self.max_draft, "an integer ≥ 1")
        require(self.alpha > 0, "alpha", self.alpha, "a number > 0")
        require(self.beta > 0, "beta", self.beta, "a number > 0")


@dataclass(frozen=True)
class EvaluateConfig:
    """evaluate-checkpoint: a drafter, prompts, and the methods to compare on them."""

    checkpoint: str  # drafter directory
    target: str | None = None  # model directory or Hub name; default: the one the drafter was trained for
    revision: str | None = None
    methods: dict[str, MethodConfig] = field(default_factory=dict)
    prompts: str = "python_stdlib"  # held-out standard-library files, or a JSONL/JSON file of prompts
    prompt_text: list[str] = field(default_factory=list)  # inline prompts instead
    prompt_chars: int = 1000  # python_stdlib: characters of a file to continue from
    num_prompts: int | None = 24  # evenly spread; null: all
    template: str = "auto"  # auto | tokenizer | vicuna | none
    max_new_tokens: int = 128
    ignore_eos: bool = False
    repeats: int = 1  # timed passes over every prompt; their median counts
    compare_transformers: bool = True  # also time model.generate
    dtype: str = "auto"  # auto: float32 on CPU, else the target's own
    device: str = "auto"
    threads: int | None = None  # CPU threads; null: torch's choice
    seed: int = 0
    out_dir: str = "runs/evaluate"

    def __post_init__(self) -> None:
        require(bool(self.methods), "method", sorted(self.methods), "at least one, e.g. method=eesd_beta")
        require(self.prompt_chars >= 1, "prompt_chars", self.prompt_chars, "an integer ≥ 1")
        require(self.num_prompts is None or self.num_prompts >= 1, "num_prompts", self.num_prompts, "null or ≥ 1")
        require(
            self.max_new_tokens >= 2,
            "max_new_tokens",
            self.max_new_tokens,
            "≥ 2 (the first is the prefill's)",
        )
        require(self.repeats >= 1, "repeats", self.repeats, "an integer ≥ 1")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "null or an integer ≥ 1")
        require_choice("template", self.template, ("auto", "tokenizer", "vicuna", "none"))
        require_choice("dtype", self.dtype, DTYPES)

"""Settings of generate-responses; light, so that a config error is reported at once. `opt` and `free` (no result
depends on it) make fields; `debug` is their value in a rehearsal, a run on tiny models (see `base.settings`)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from outrider.base.errors import require
from outrider.base.settings import DEFAULT, Count, Positive, RunConfig, Seed, Url, free, opt, require_defaults
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.settings import Rehearsed, RunDtype, TargetOrTokenizer
from outrider.inference.settings.sampling import SamplingConfig

NotNegative = Annotated[int, Ge(0)]
_OF_SERVERS = ("server_model", "concurrency", "server_timeout", "server_retries")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(TargetOrTokenizer, Rehearsed, RunConfig):
    """generate-responses: the target answers the prompts of a data set, for training a drafter on what it says."""

    asks: ClassVar[bool] = True  # its records are prompts (see `inference.loading.rehearsal`)
    run_files: ClassVar[tuple[str, ...]] = ("responses-*.jsonl",)
    data: DataConfig = free()
    """its user turns, or the beginnings of its plain texts that are not held out, are the prompts; it may grow"""
    turns: Literal["all", "first"] = "all"
    """conversations: answer all user turns, each after the target's own answers, or the first"""
    prefix_tokens: Count = opt(64, "plain text: tokens of a text to continue, at most half of the text", debug=24)
    max_new_tokens: Count = opt(512, "per answer", debug=12)
    greedy_tokens: NotNegative = opt(4, "so many first tokens of an answer are the likeliest, the rest are sampled")
    temperature: float = opt(1.0, "of the sampled tokens")
    top_k: int = opt(0, "sample among the k likeliest tokens; 0: all")
    top_p: float = opt(1.0, "sample among the likeliest tokens that together have this probability; 1: all")
    keep_truncated: bool = opt(True, "false: drop answers that reached max_new_tokens without an end")
    top_k_logits: NotNegative = opt(0, debug=8)
    """also keep the target's k largest log-probabilities at every token, for distillation"""
    batch_size: Count = free(32, "prompts decoded together by one process", debug=8)
    smallest_batch: Count | None = free(None)
    """prompts with which a batch goes on, the others left for later, where minutes= would not hold it; null: all"""
    shard_size: Count = free(512, debug=8)
    """most prompts of one file, which ends within five minutes; what is in no file is repeated after a kill"""
    dtype: RunDtype = "auto"
    """auto: float32 on CPU, else the target's own; fast: also bfloat16 on a CPU that has instructions for it"""
    minutes: Positive | None = free(None, debug=None)
    """time limit of all runs in out_dir together; prompts of all lengths are answered; null: no limit"""
    server: Url | None = free(None, debug=None)
    """URL of an OpenAI-compatible server that runs the target, of which only config and tokenizer are read here"""
    server_model: str | None = free(None, "the target's name there; null: the first one that it lists", debug=None)
    concurrency: Count = free(16, "requests to the server at a time, batch_size at most", debug=DEFAULT)
    server_timeout: Positive = free(600.0, "seconds that the server may take for one request", debug=DEFAULT)
    server_retries: NotNegative = free(5, debug=DEFAULT)
    """retries of a failed request, after 1, 2, 4, … 60 s, or as the server says"""
    device_map: str | None = free(None, "auto spreads a large target over all GPUs of one process", debug=None)
    plan: bool = free(False)
    """only print the number of prompts, the most tokens and memory that they take, and what ends the run; needs no
    weights"""
    seed: Seed = opt(0, "of sampling; an answer depends on it and the prompt's id")
    out_dir: str = free("runs/generate_responses", "where everything goes")

    def check_fields(self) -> None:  # `Settings` runs the bases' checks too
        weights = {name: weight for name, weight, _ in self.data.parts()}  # of the sources of a mix
        expected = "equal weights (or 0, to leave a source out): every prompt is answered; weigh when training"
        require(len(set(weights.values())) <= 1, "data.mix weights", weights, expected)
        _ = self.sampling, self.template_arguments  # run their own checks
        self.require_one()
        debugs_tokenizer = self.debug and self.tokenizer is not None
        self.require("debug", not debugs_tokenizer, "false with tokenizer=, as a rehearsal asks no server")
        if self.server is None:
            self.require("tokenizer", self.tokenizer is None, "null without server=URL, which runs the target")
            require_defaults(self, _OF_SERVERS, "it is read with server=URL")
            return
        require(self.concurrency <= self.batch_size, "concurrency", self.concurrency, "at most batch_size")
        require_defaults(self, ("dtype", "device_map"), "the server runs the target")

    @property
    def template_arguments(self) -> dict[str, object]:
        """The `chat_template_kwargs` of all sources. Raises `UserError` if they differ."""
        kwargs = [part.chat_template_kwargs for _, _, part in self.data.parts()] or [self.data.chat_template_kwargs]
        require(kwargs == kwargs[:1] * len(kwargs), "data.mix chat_template_kwargs", kwargs, "equal ones")
        return kwargs[0]

    @property
    def sampling(self) -> SamplingConfig:
        """The sampling settings for tokens after the greedy ones."""
        return SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

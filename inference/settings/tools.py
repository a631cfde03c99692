"""Settings of the server, of the audit and of compare-reports.

An option is a field; its help stands in the call, or below. report.json of an audit records those not made by `free`.
"""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from outrider.base.errors import require
from outrider.base.settings import Count, Named, Positive, RunConfig, Seed, Url, free, opt, require_defaults
from outrider.data_prep.text.settings import PromptSource, PromptTemplate, RecordFile, TemplateArguments
from outrider.draft_models.targets.settings import Dtype, InputPath, Model
from outrider.inference.settings.evaluate import DecodingConfig
from outrider.inference.settings.sampling import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class ServeConfig(DecodingConfig):
    """serve: answer clients of OpenAI's API, and a page to talk at, with a drafter before the target."""

    name: Annotated[str, Named("a name")] | None = opt(None, "of the model, for clients; null: its own")
    host: str = opt("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine's")
    port: Annotated[int, Ge(0), Lt(2**16)] = opt(8000, "0: any that is free")
    allow_hosts: list[str] = opt(factory=list, help="names that clients may call it by, beside localhost; *: any")
    allow_origins: list[str] = opt(factory=list, help="pages elsewhere that may ask, as https://example.org; *: all")
    api_key: Annotated[str, Named("a key of printable ASCII characters", r"[!-~]([ -~]*[!-~])?")] | None = None
    """key that clients must send; null: that of the variable OUTRIDER_API_KEY, or no key"""
    max_new_tokens: Count = opt(512, "most tokens of an answer, if the request states no limit")
    batch: Count = opt(8, "texts that are decoded at once")
    queue: Annotated[int, Ge(0)] = opt(64, "texts that may wait meanwhile; requests for more get status 429")
    cache_bytes: Count | None = opt(None)
    """of the KV caches of all texts, which wait for it; null: half of the free memory"""
    context: Count | None = opt(None, "tokens of a prompt and its answer together; null: the models' context")
    max_bytes: Count = opt(2**22, "of a request")
    timeout: Positive = opt(600.0, "seconds that a request may take, waiting included")
    grace: Count = opt(30, "seconds to finish what is being answered after SIGTERM or Ctrl-C")
    log: Annotated[str, Named("a file")] | None = free(None)
    """file to which every answer is written after its end, with the texts of prompt and answer; trainings read it with
    data=responses; null: none"""
    remote_swap: bool = opt(False, "let clients of other machines give a drafter (POST /v1/drafter), a directory here")
    seed: int | None = opt(None, "of requests that have none, in their order; null: the system draws theirs")

    def _check_methods(self) -> None:  # called by `check_drafters`; methods: of `DecodingConfig`
        require(len(self.methods) < 2, "method", sorted(self.methods), "one, as one drafter serves all requests")


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunConfig):
    """compare-reports: two finished evaluations side by side, over the prompts that both have measured."""

    compare: list[Annotated[str, InputPath("the directory of an evaluation", holds=("report.json",))]] = field(
        default_factory=list
    )
    """the directories of two evaluations, the earlier or simpler one first: compare=[runs/a,runs/b]"""
    pairs: dict[str, str] = field(default_factory=dict)
    """methods of the first to set beside methods of the second, as {eesd_fixed: eesd_beta}; empty: those of equal
    names"""
    seed: int = opt(0, "of the bootstrap")
    out_dir: str = free("runs/compare", "where compare.md and compare.json go")

    def check_fields(self) -> None:
        self.require("compare", len(self.compare) == 2, "two directories of evaluations, e.g. [runs/a,runs/b]")


AnswerFile = Annotated[str, RecordFile("a JSONL file of answers")]
OF_SERVERS = (  # options that are read if a server is asked, and not with a file of answers
    "server_model", "concurrency", "server_timeout", "server_retries", "prompts", "num_prompts", "template",
    "chat_template_kwargs", "max_new_tokens", "temperature", "top_k", "top_p",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AuditConfig(RunConfig):
    """audit: whether the answers of any server are those of a target, token by token."""

    target: Model = free(help="model directory, GGUF file or Hub name: what the server should decode as")
    revision: str | None = free(None, "of the target on the Hub: branch, tag or commit")
    answers: AnswerFile | None = None
    """JSONL, a line {"prompt_ids": […], "output_ids": […], "temperature": 0}; also top_k, top_p, min_p,
    repetition_penalty; or texts, {"prompt": "…", "text": "…"}, which are tokenised again"""
    server: Url | None = None
    """URL of an OpenAI-compatible server instead, which is asked `prompts`; its answers go to answers.jsonl in
    out_dir"""
    server_model: str | None = opt(None, "the target's name there; null: the first one that it lists")
    concurrency: Count = free(16, "requests to the server at a time")
    server_timeout: Positive = free(600.0, "seconds that the server may take for one request")
    server_retries: Annotated[int, Ge(0)] = free(5, "how often a failed request is repeated")
    prompts: PromptSource = opt("python_stdlib", "as evaluate-checkpoint's; of each prompt the first turn is asked")
    num_prompts: Count | None = free(64, "evenly spread; null: all")
    template: PromptTemplate = opt("auto", "how chat prompts are rendered; none: bare text")
    chat_template_kwargs: TemplateArguments = opt(factory=dict, help="what the chat template reads besides, by name")
    max_new_tokens: Count = opt(256, "per answer")
    temperature: float = opt(0.0, "0: greedy; the server is asked for it")
    top_k: int = opt(0, "sample among the k likeliest tokens; 0: all")
    top_p: float = opt(1.0, "sample among the likeliest tokens that together have this probability; 1: all")
    control: AnswerFile | None = opt(None, "the same of the server's plain decoding, which is judged beside them")
    dtype: Dtype = opt("auto", "what the server computes in; auto: what the weights are stored in")
    device: str = free("auto", "auto | cpu | cuda | cuda:N")
    level: Annotated[float, Gt(0), Lt(1)] = opt(0.001, "how often sampled answers may be refused by chance")
    # coins: the uniform numbers by which `draws_of` (inference/audit) randomises the statistic u
    seed: Seed = opt(0, "of what a server draws, and of the coins of the tests and their simulation")
    out_dir: str = free("runs/audit", "where report.md and report.json go")

    def check_fields(self) -> None:
        option, is_single_source = f"server={self.server} answers", (self.answers is None) != (self.server is None)
        require(is_single_source, option, self.answers, "a JSONL file of answers, or server")
        require_defaults(self, OF_SERVERS if self.server is None else (), "it is read with server=URL")
        unread_options = ("top_k", "top_p") if self.temperature == 0 else ()
        require_defaults(self, unread_options, "greedy answers have nothing to choose from; temperature=1 samples")
        SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)  # runs its own checks

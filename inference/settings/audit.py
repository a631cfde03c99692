"""Settings of the audit."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Lt

from draft_models.targets.settings import Dtype, Model
from outrider.errors import require
from outrider.settings import Place, RunConfig, Seed, free

AnswerFile = Annotated[str, Place("a JSONL file of answers")]


@dataclass(frozen=True, kw_only=True)
class AuditConfig(RunConfig):
    """audit: whether the answers of any server are those of a target, token by token."""

    target: Model = free()  # model directory, GGUF file or Hub name: what the server should decode as
    revision: str | None = free(None)  # of the target on the Hub: branch, tag or commit
    # JSONL, a line {"prompt_ids": […], "output_ids": […], "temperature": 0}; also top_k, top_p, min_p,
    # repetition_penalty; or texts, {"prompt": "…", "text": "…"}, which are tokenised again
    answers: AnswerFile | None = None
    control: AnswerFile | None = None  # the same of the server's plain decoding, which is judged beside them
    dtype: Dtype = "auto"  # what the server computes in; auto: what the weights are stored in
    device: str = free("auto")  # auto | cpu | cuda | cuda:N
    level: Annotated[float, Gt(0), Lt(1)] = 0.001  # how often sampled answers may be refused by chance
    seed: Seed = 0  # of the coins that the tests and their simulation draw
    out_dir: str = free("runs/audit")  # where report.md and report.json go

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.answers is not None, "answers", None, "a JSONL file of answers")

"""The target's own greedy answers on record: what it would say is known without it."""

from typing import Any

from data_prep.text.settings import DataConfig
from data_prep.text.sources import RUN_FILE, resolve_paths
from draft_models.losses import IGNORE
from draft_models.targets.fingerprint import changed_parts, config_differences
from draft_models.targets.open_target import OpenTarget
from outrider.errors import UserError
from outrider.files import read_mapping
from train.core.training import Batch
from train.parts.capture import Text

REMEDY = "make others with outrider generate-responses temperature=0 top_k_logits=2"


def require_answers_of(target: OpenTarget, data: DataConfig) -> None:
    """Raise `UserError` where the responses that `data` names are not greedy or are of another target or template, as
    far as the runs that made them have recorded it."""
    for file in sorted({path.parent / RUN_FILE for path in resolve_paths(data.path)}):
        run: dict[str, Any] = read_mapping(file, "record of a run", REMEDY) if file.is_file() else {}
        mine, model = target.fingerprint, run.get("model", {})
        greedy = run.get("temperature", 0) == 0 or run.get("greedy_tokens", 0) >= run.get("max_new_tokens", 0)
        other = bool(config_differences(model.get("config", mine.config), mine.config))
        other |= bool(changed_parts(model.get("tensors", {}), mine.tensors or {}))
        other |= run.get("tokenizer", mine.tokenizer) != mine.tokenizer
        rendered = target.tokenizer.chat_template if data.template == "tokenizer" else data.template
        wrong = {
            "sampled, but for the first tokens": not greedy,
            f"of another target than {target.source}": other,
            f"of another template than {data.template}": any(one != rendered for one in run.get("template", ())),
        }
        found = " and ".join(what for what, is_so in wrong.items() if is_so)
        if found:
            raise UserError(f"data.path={file.parent}: these answers are {found}; {REMEDY}")


def recorded_text(row: Batch) -> Text | None:
    """The first prompt of a row (see `TopKRows`) and the answer to it; None where a token of that was neither the
    likeliest nor as likely."""
    said = row["labels"] != IGNORE
    first = int(said.nonzero()[0])
    place = slice(first, first + int(said[first:].int().cumprod(0).sum()))
    answer, logprobs = row["labels"][place], row["top_logprobs"][place]
    likeliest = (row["top_ids"][place] == answer[:, None]) & (logprobs == logprobs[:, :1])
    greedy = bool(likeliest.any(-1).all())
    return Text(row["input_ids"][: first + 1].tolist(), answer.tolist()) if greedy else None

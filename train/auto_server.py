"""The part of `outrider auto server=URL` that differs: the server is tried out first, and a replay is the report.

The steps are those of `auto_run` with the server in the target's place. It answers the held-out prompts greedily too. A
replay drafts for these recorded answers without the target: so τ of look-ups, tables and small LMs is exact, at several
lengths of drafts. Requests time the engine's passes. Both give the speed-up to expect there.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.base.errors import UserError
from outrider.base.files import read_mapping
from outrider.base.settings import construct
from outrider.base.words import quote_word
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.inference.batch.server import TargetServer
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.measure.replay_report import MethodReplay
from outrider.inference.measure.statistics import MARGIN, MIN_PROMPTS, MedianInterval
from outrider.inference.settings.engine import draft_length
from outrider.inference.settings.kinds import PROMPT_LOOKUP, SMALL_LM
from outrider.train import steps
from outrider.train.settings.auto import AutoConfig
from outrider.train.steps import ConfigFor, write_words

REPLAY, LOG = "inference/replay.py", "auto.log"
LENGTHS = (1, 2, 3, 4, 6, 8)  # of the drafts that are replayed
_MAX_ANSWERS = 100  # answers that are replayed at most, with drafts of each length


def open_server(config: AutoConfig, target: OpenTarget, top_k: int) -> TargetServer:
    """The server, which has answered a short prompt with `top_k` log-probabilities a token. Raises `UserError`."""
    settings = GenerateConfig(
        tokenizer=config.tokenizer, server=config.server, server_model=config.server_model, data=DataConfig(),
        temperature=0.0, top_k_logits=top_k, concurrency=config.concurrency, batch_size=config.concurrency,
    )  # fmt: skip
    context_and_vocab = context_limit(target.config), target.config.vocab_size
    return TargetServer(settings, target.tokenizer, end_tokens(target), *context_and_vocab)


def replay_there(config: AutoConfig, folder: Path, step_names: Sequence[str], config_for: ConfigFor) -> list[str]:
    """Replay the held-out answers; returns the recommendation, the report's path, and the command that repeats it.

    step_names: of the steps that have run. Raises `UserError` if the replay fails.
    """
    methods = ["prompt_lookup", "ngrams", *(["small_lm/fixed"] if SMALL_LM.name in step_names else [])]
    options: dict[str, object] = {
        "transcripts": folder / "heldout", "tokenizer": config.tokenizer, "table": folder / "trigrams",
        "server": config.server, "server_model": config.server_model, "method": methods, "draft_tokens": [*LENGTHS],
        "num_prompts": _MAX_ANSWERS, "out_dir": folder / "replay",
    }  # fmt: skip
    options |= {SMALL_LM.name: folder / SMALL_LM.name} if SMALL_LM.name in step_names else {}
    cli_words, log = write_words(options), folder / LOG
    if status := steps.run_command(REPLAY, cli_words, config_for(REPLAY, cli_words), log):
        raise UserError(f"server={config.server}: the replay failed (exit status {status}); see {log}")
    content = read_mapping(folder / "replay/report.json", "report of a replay", "remove it, and give resume=true")
    recommendation = recommend_there(construct(list[MethodReplay], content["reports"]))
    replay_command = " ".join(map(quote_word, ["outrider", "replay", *cli_words]))
    return [recommendation, f"report: {folder / 'replay/report.md'}", f"measure again: {replay_command}"]


def recommend_there(reports: Sequence[MethodReplay]) -> str:
    """The sentence about the method with the highest speed-up to expect. reports: of a replay, one for each method.

    A verdict needs a 95 % interval of the speed-up on one side of 1 + `MARGIN`, an error common to all prompts.
    """
    speedups = {report.method: report.expected or MedianInterval() for report in reports}  # without timed passes: empty
    best = max(reports, key=lambda report: (speedups[report.method].median or 0.0, report.tau))
    speedup, tau_text = speedups[best.method], f"τ {best.tau:.2f}"
    if best.expected is None:
        return f"undecided: the passes of the engine could not be timed; `{best.method}` has the most, {tau_text}"
    if speedup.median is None or speedup.ci95 is None or speedup.prompts < MIN_PROMPTS:
        shortage = f"a verdict needs {MIN_PROMPTS} conversations with answers that do not loop"
        return f"undecided: {shortage}; `{best.method}` has the most, {tau_text}"
    low, high = speedup.ci95
    gain_text = f"{speedup.median:.2f} times plain decoding [{low:.2f}, {high:.2f}] with {tau_text}"
    if low > 1 + MARGIN:
        return f"`{best.method}` should be the fastest in this engine: {gain_text}{_how_to_start(best)}"
    if high < 1 + MARGIN:
        return f"nothing pays here: the best, `{best.method}`, would have {gain_text}"
    return f"undecided: the best, `{best.method}`, would have {gain_text}; more prompts narrow it"


def _how_to_start(report: MethodReplay) -> str:
    """The options with which vLLM drafts from the text; a drafter's are in the README of its export."""
    method = report.settings
    if method.source != PROMPT_LOOKUP.name:
        advice = "first measure it again, with draft_server= an engine that runs the exported drafter alone"
        return f"; {advice}; drafts of {draft_length(method)} tokens"
    spec_config = {"method": "ngram", "num_speculative_tokens": draft_length(method)}
    spec_config |= {"prompt_lookup_max": method.max_ngram, "prompt_lookup_min": 1}
    return f"; vllm serve MODEL --speculative-config '{json.dumps(spec_config)}'"

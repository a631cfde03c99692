"""replay: τ of drafters from recorded answers; with a server also the speed-up to expect in its engine.

A drafter that sees only tokens drafts along an answer of the target as it would have while the target decoded it.

plan                  `recordings` or `read_responses`: the answers as token ids
measure               `time_server`, `time_drafter`, `replay_turns`
judge, write          `replay_report`, `write_replay`
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.base.errors import UserError, require, warn
from outrider.base.files import require_writable
from outrider.base.run_dirs import only_run
from outrider.base.streams import Streams
from outrider.data_prep.text.prompts import read_prompts, spread_evenly
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.unseen_target import open_unseen
from outrider.inference.batch.server import TargetServer
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.measure.recordings import (
    RecordedTurn,
    load_vocabulary,
    read_responses,
    read_transcripts,
    recordings,
)
from outrider.inference.measure.replay import drafts_in_one_pass, load_replayed, replay_turns
from outrider.inference.measure.replay_report import MethodReplay, replay_report, write_replay
from outrider.inference.measure.server_costs import WIDTHS, ServerCosts, expect_speedup, measure_drafter, measure_server
from outrider.inference.measure.statistics import loop_length
from outrider.inference.settings.engine import draft_length, refusal_of, with_lengths
from outrider.inference.settings.evaluate import ReplayConfig
from outrider.inference.settings.kinds import NGRAMS, SMALL_LM


def replay_answers(config: ReplayConfig) -> list[MethodReplay]:
    """Replay every method of `config` over recorded answers, and write report.json and report.md to `config.out_dir`.

    The report has τ, overall and by category, the drafting time of a round and, with a server, the expected speed-up.
    """
    prompts = None if config.prompts is None else read_prompts(config.prompts, limit=config.num_prompts)
    out_dir = require_writable(config.out_dir)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with only_run(out_dir, "results"):
        vocabulary = load_vocabulary(config.tokenizer)
        if prompts is None:
            turns = read_responses(config.transcripts, vocabulary)
            turns = spread_evenly(turns, config.num_prompts or len(turns))
        else:
            turns = recordings(prompts, read_transcripts(config.transcripts), vocabulary)
        require(bool(turns), "transcripts", config.transcripts, "recorded answers")
        costs = None if config.server is None else time_server(config, turns)
        drafter_seconds = time_drafter(config, turns) if costs is not None and config.draft_server is not None else ()
        drafters, make_session = load_replayed(config, vocabulary, turns)
        reports = []
        # "": any engine. A method that some engine runs is repeated for each length in `draft_tokens`, if any is given.
        for name, method in with_lengths("", config.methods, config.draft_tokens).items():
            generations = replay_turns(name, method, drafters, turns, config, make_session)
            report = replay_report(name, method, turns, generations)
            # Without a refusal some engine drafts so. No engine drafts trees, as n-grams do without `draft_tokens`.
            is_chain = refusal_of("", method) is None and (bool(config.draft_tokens) or method.source != NGRAMS.name)
            if costs is not None and is_chain and draft_length(method) < WIDTHS[-1]:  # wider passes are not timed
                streams = Streams(config.seed).within("expected", name)
                token_seconds = drafter_seconds if method.source == SMALL_LM.name else ()
                # Texts that end in a loop are left out: drafts in a loop are too easy.
                loopless = [(g, turn) for g, turn in zip(generations, turns, strict=True) if not loop_length(g.tokens)]
                speedup = expect_speedup(
                    [generation for generation, _ in loopless], costs, streams, token_seconds,
                    units=[turn.conversation for _, turn in loopless], in_one_pass=drafts_in_one_pass(drafters),
                )  # fmt: skip
                report = replace(report, expected=speedup)
            reports.append(report)
        write_replay(config, out_dir, reports)
    return reports


def time_server(config: ReplayConfig, turns: Sequence[RecordedTurn]) -> ServerCosts | None:
    """The costs of passes in the engine behind `config.server`, after recorded tokens; None, with a warning, if they
    cannot be timed. Raises `UserError` if the server does not answer."""
    server = _open_server(config, "server", config.server, config.server_model)
    try:
        return measure_server(server, _recorded_tokens(turns))
    except UserError as error:  # its timings are not usable
        warn(f"no speed-up to expect: {error}")
        return None


def time_drafter(config: ReplayConfig, turns: Sequence[RecordedTurn]) -> tuple[float, ...]:
    """Seconds of a token of the small LM in the engine behind `config.draft_server`. Raises `UserError` if it does not
    answer."""
    return measure_drafter(_open_server(config, "draft_server", config.draft_server, None), _recorded_tokens(turns))


def _open_server(config: ReplayConfig, option: str, url: str | None, model: str | None) -> TargetServer:
    """The server at `url`, the value of `option`. model: the target's name on it; None: the first that it lists."""
    target = open_unseen(config.tokenizer)
    settings = GenerateConfig(  # temperature=0: all is greedy. checked=False below: timed requests get no logprobs
        tokenizer=config.tokenizer, server=url, server_model=model, data=DataConfig(), greedy_tokens=0, temperature=0.0
    )
    model_limits = context_limit(target.config), target.config.vocab_size
    return TargetServer(settings, target.tokenizer, end_tokens(target), *model_limits, checked=False, option=option)


def _recorded_tokens(turns: Sequence[RecordedTurn]) -> list[int]:
    return [token for turn in turns for token in (*turn.prompt, *turn.answer)]

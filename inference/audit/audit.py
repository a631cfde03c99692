"""The audit: the target reads answers that were decoded elsewhere, teacher-forced, and judges each token.

A greedy token is judged as in an evaluation (`inference.measure.lossless`): how far is its logit below the best one?
The unit is the rounding error of transformers' own pass in the server's precision. Sampled tokens are tested as draws
from the target's distributions (`inference.audit.draws`).

    audit           reads or requests the answers, and writes the report
    score_answers   the target's reading of a file: an `AuditArm`
    judge_arm       the judgement of an arm: a `Finding`
    write_page      report.md
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import require
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.base.processes import join_processes, only_run_of
from outrider.base.progress import track_progress
from outrider.base.streams import Streams
from outrider.base.words import Table
from outrider.draft_models.targets.open_target import open_target, pick_device, pick_dtype, stored_dtype
from outrider.inference.audit.answers import ANSWERS, ServedAnswer, read_answers, request_answers
from outrider.inference.audit.draws import (
    SIMULATED,
    Draws,
    draws_of,
    join_draws,
    most_tried,
    p_values,
    refute,
    tokens_needed,
)
from outrider.inference.core.sampling import Sampler, invert
from outrider.inference.loading.models import load_reference
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.measure import lossless
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.settings.tools import AuditConfig

REPORT = "report.json"
LOGITS = 2**26  # most logits held at once; a text with more is read in parts, each with its beginning again
ROWS = 64  # rows of logits that are judged together in float64
SHOWN = 10  # tokens of a kind in report.md, at most


class JudgedToken(NamedTuple):
    """A token of an answer: its line, its position there, the likeliest token in its place, and `off`.

    off: of a greedy token, how far its logit is below the best logit, in rounding errors; of a sampled token, the
    probability to draw a token that is no likelier.
    """

    line: int
    position: int
    token: int
    likeliest: int
    off: float


@dataclass(frozen=True)
class Finding:
    """The judgement of a file. faults: sentences; at: the faulty tokens; numbers: the evidence."""

    faults: tuple[str, ...]
    at: tuple[JudgedToken, ...]
    numbers: Mapping[str, float | None]
    oddest: tuple[JudgedToken, ...]
    unlikeliest: tuple[JudgedToken, ...]

    @property
    def verdict(self) -> str:
        if self.at:
            positions = ", ".join(f"{token.line}:{token.position}" for token in self.at[:SHOWN])
            return f"{len(self.at)} tokens are faults: {positions}{', …' * (len(self.at) > SHOWN)} (line:position)"
        return "a fault over all tokens, at none alone" if self.faults else "only rounding"


@dataclass
class AuditArm:
    """The target's reading of a file of answers.

    outliers: greedy tokens that are not the best, and sampled tokens that top_k, top_p or min_p exclude. sampled,
    draws: all other sampled tokens, and their statistics. simulated: by fault, draws of a server with this fault.
    """

    deviations: list[lossless.Deviation] = field(default_factory=list)
    outliers: list[JudgedToken] = field(default_factory=list)
    sampled: list[JudgedToken] = field(default_factory=list)
    draws: list[Draws] = field(default_factory=list)
    simulated: dict[str, list[Draws]] = field(default_factory=dict)


def audit(config: AuditConfig) -> None:
    """Judge `config.answers`, write report.md and report.json to `config.out_dir`, and print report.md. Ends the
    process with status 1 if the answers have a fault. Raises `UserError` for bad input.
    """
    out_dir = require_writable(config.out_dir)
    with only_run_of(join_processes(), out_dir, "an audit", config.resume):
        expected = "a directory without an audit; resume=true judges anew, and asks a server what is missing"
        empty = not any((out_dir / file).exists() for file in ((REPORT, ANSWERS) if config.server else (REPORT,)))
        require(config.resume or empty, "out_dir", config.out_dir, expected)
        target = open_target(config.target, config.revision, by_layers=False)
        auto, device = config.dtype == "auto", pick_device(config.device)
        dtype = stored_dtype(target.config) if auto else pick_dtype(config.dtype, target.config, device)
        control = {"control": read_answers(config.control, target)} if config.control else {}
        counts = request_answers(config, target, end_tokens(target), out_dir) if config.server else {}
        answers = {"answers": read_answers(config.answers or str(out_dir / ANSWERS), target), **control}
        findings, token_counts = judge_answers(config, load_reference(target, dtype, device), answers)
        findings["answers"] = replace(findings["answers"], numbers={**counts, **findings["answers"].numbers})
        question = f"Is {config.server or config.answers} what {config.target} says, decoded in {dtype}?"
        page = write_page(question, findings, token_counts, target.tokenizer)
        write_atomically(out_dir / "report.md", page.encode())
        verdicts = {arm: asdict(finding) | {"verdict": finding.verdict} for arm, finding in findings.items()}
        settings = config.decisions() | {"dtype": str(dtype), "target": config.target}
        write_json(out_dir / REPORT, {"settings": settings, "arms": verdicts, "tokens_needed": token_counts})
    print(page, flush=True)
    if findings["answers"].faults:
        print(f"error: not lossless: {findings['answers'].verdict}; see {out_dir}/report.md", file=sys.stderr)
        sys.exit(1)


def judge_answers(
    config: AuditConfig, model: PreTrainedModel, answers: Mapping[str, Mapping[int, ServedAnswer]]
) -> tuple[dict[str, Finding], dict[str, int | None]]:
    """By arm ("answers", "control") the finding; and by fault, how many sampled tokens reveal it (`tokens_needed`)."""
    streams = Streams(config.seed).within("audit")
    arms = {
        arm: score_answers(model, lines, streams.within(arm), simulate=arm == "answers")
        for arm, lines in answers.items()
    }
    findings = {arm: judge_arm(arms[arm], lines, config.level) for arm, lines in answers.items()}
    generator = torch.Generator().manual_seed(streams.number("power", bits=64))
    simulated = {fault: join_draws(parts) for fault, parts in arms["answers"].simulated.items()}
    return findings, {fault: tokens_needed(draws, config.level, generator) for fault, draws in simulated.items()}


@torch.inference_mode()
def score_answers(
    model: PreTrainedModel, answers: Mapping[int, ServedAnswer], streams: Streams, *, simulate: bool = True
) -> AuditArm:
    """The reading of `answers` by `model`, the target run by transformers in the server's precision.

    simulate: also draw tokens as servers with a fault do.
    """
    arm, rows = AuditArm(), max(1, LOGITS // model.config.get_text_config().vocab_size)
    for line, answer in track_progress(answers.items(), "reading", "answers"):
        generator = torch.Generator().manual_seed(streams.number(line, bits=64))
        for start in range(0, len(answer.output_ids), rows):
            prompt, text = [*answer.prompt_ids, *answer.output_ids[:start]], answer.output_ids[start : start + rows]
            part = AnswerPart(line, start, answer, lossless.make_reference(model, prompt, text))
            if answer.temperature == 0:
                _add_greedy(arm, part)
            else:
                _add_sampled(arm, part, generator, simulate=simulate)
    return arm


@dataclass(frozen=True)
class AnswerPart:
    """Tokens of an answer, from `start` on, and the target's reading of them."""

    line: int
    start: int
    answer: ServedAnswer
    reference: lossless.Reference

    @property
    def tokens(self) -> Tensor:
        """The tokens [t, 1]."""
        return torch.tensor(self.reference.text, device=self.reference.logits.device)[:, None]

    def scores(self, logits: Tensor, answer: ServedAnswer | None = None) -> Tensor:
        """The scores [t, V] by which tokens are chosen, from logits [t, V], with the settings of `answer`."""
        sampler = Sampler(answer or self.answer)
        if sampler.greedy and not sampler.reads_context:
            return logits  # in all of their precision
        prompt_length = len(self.reference.prompt)
        text = torch.tensor([*self.reference.prompt, *self.reference.text], device=logits.device)
        contexts = [text[: prompt_length + row] for row in range(len(logits))]
        return sampler.scores(logits, contexts if sampler.reads_context else None)

    def tokens_at(self, rows: Tensor, best: Tensor, off: Tensor) -> list[JudgedToken]:
        """The tokens in `rows`, with their positions in the answer."""
        columns = (column.tolist() for column in (rows + self.start, self.tokens[rows, 0], best[rows], off))
        return [JudgedToken(self.line, *values) for values in zip(*columns, strict=True)]

    def off(self, measured: Callable[[Tensor], Tensor]) -> Tensor:
        """`measured` in units of the rounding errors [t]. If one would be a fault, above `GAP`, the unit is the largest
        error of readings in several piece lengths (`Reference.tipping_noise`)."""
        off = measured(self.reference.logits_noise)
        return measured(self.reference.tipping_noise()[1]) if bool((off > lossless.GAP).any()) else off


def _add_greedy(arm: AuditArm, part: AnswerPart) -> None:
    """Add greedy tokens to `arm`: those that are not the best become outliers."""
    scores, stock_scores = (part.scores(logits) for logits in (part.reference.logits, part.reference.stock_logits))
    best = scores.argmax(-1)
    rows = (part.tokens[:, 0] != best).nonzero()[:, 0]
    off = part.off(lambda noise: lossless.measure_regrets(scores, part.tokens, noise))[rows]
    arm.outliers += part.tokens_at(rows, best, off)
    arm.deviations.append(_deviation(len(best), off, int((stock_scores.argmax(-1) != best).sum())))


def _add_sampled(arm: AuditArm, part: AnswerPart, generator: torch.Generator, *, simulate: bool) -> None:
    """Add sampled tokens to `arm` as draws. A token that top_k, top_p or min_p exclude becomes an outlier. Its distance
    to the tokens that they keep is judged, as a greedy token's distance to the best."""
    scores, stock_scores = (part.scores(logits) for logits in (part.reference.logits, part.reference.stock_logits))
    support, best, tokens = scores.isfinite(), scores.argmax(-1), part.tokens
    inside, stock_outside = support.gather(-1, tokens)[:, 0], 0  # [t]; of transformers' logits, draws that are excluded
    for span in torch.arange(len(tokens), device=tokens.device).split(ROWS):
        log_p, rounded = (side[span].double().log_softmax(-1) for side in (scores, stock_scores))  # [rows, V]
        ids = invert(rounded.exp(), torch.rand(len(span), 1, dtype=torch.float64, generator=generator).to(log_p.device))
        stock_outside += int((~support[span].gather(-1, ids)).sum())
        if not len(rows := span[inside[span]]):
            continue
        log_p, rounded = log_p[inside[span]], rounded[inside[span]]
        tried = sum(len(draws.tail) for draws in next(iter(arm.simulated.values()), ()))
        drawn, simulated = draws_of(log_p, rounded, tokens[rows, 0], generator, simulate=simulate and tried < SIMULATED)
        arm.draws.append(drawn)
        arm.sampled += part.tokens_at(rows, best, drawn.tail)
        for fault, draws in simulated.items():
            arm.simulated.setdefault(fault, []).append(draws)
    rows = (~inside).nonzero()[:, 0]
    uncut = part.scores(part.reference.logits, replace(part.answer, top_k=0, top_p=1.0, min_p=0.0))[rows]
    off = part.off(
        lambda noise: measure_excess(part.answer, uncut, tokens[rows], noise[rows] / part.answer.temperature)
    )
    arm.outliers += part.tokens_at(rows, best, off)
    arm.deviations.append(_deviation(len(tokens), off, stock_outside))


def measure_excess(config: SamplingConfig, scores: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
    """How far tokens [n, 1] are beyond the cuts of top_k, top_p and min_p, in units of noise [n]; 0 for kept ones.

    scores [n, V]: before these cuts, at the temperature. The distance is the smallest increase of the token's logit
    after which `Sampler` may keep it. top_k: the distance to the k-th likeliest. min_p: to the threshold. top_p: an
    increase s changes the log-odds of the probability before the token by s at most, and moves it ahead of tokens
    that are less than s better.
    """
    ordered = scores.double().sort(-1, descending=True).values
    lead = ordered - scores.double().gather(-1, tokens)
    shifts = [torch.zeros_like(lead[:, 0])]
    if config.top_k:
        ordered, lead = ordered[:, : config.top_k], lead[:, : config.top_k]
        shifts.append(lead[:, -1])
    if config.top_p < 1:
        p = ordered.softmax(-1)
        log_odds = (p.cumsum(-1) - p).clamp(0, 1).logit() - math.log(config.top_p / (1 - config.top_p))
        shifts.append(torch.maximum(lead, log_odds).amin(-1))
    if config.min_p:
        shifts.append(lead[:, 0] + math.log(config.min_p))
    return (torch.stack(shifts).amax(0) / noise).clamp(0, lossless.WORST)


def _deviation(positions: int, gaps: Tensor, stock_gaps: int) -> lossless.Deviation:
    """A server shows no keys and values, so only its choices are judged. stock_gaps: transformers' other choices."""
    return lossless.Deviation(
        positions, bulk=(0.0,), peak=0.0, peak_row=0, peak_position=0, gaps=tuple(gaps.tolist()), own_gaps=stock_gaps
    )


def judge_arm(arm: AuditArm, answers: Mapping[int, ServedAnswer], level: float) -> Finding:
    choices, draws = lossless.judge_deviations(arm.deviations), join_draws(arm.draws) if arm.draws else None
    first_rows = [row for row, token in enumerate(arm.sampled) if token.position == 0]
    p_by_test = p_values(draws, first_rows) if draws else {}
    failed_tests = refute(p_by_test, level)
    outliers = sorted(arm.outliers, key=lambda token: -token.off)
    unlikely = sorted(arm.sampled, key=lambda token: token.off)
    faulty = [token for token in outliers if token.off > lossless.GAP]
    if "unlikeliest" in failed_tests:
        faulty += [token for token in unlikely if token.off * len(unlikely) <= level]
    tests = (f"the drawn tokens fail the test `{name}` (p = {p_by_test[name]:.1g})" for name in failed_tests)
    numbers = {
        "answers": len(answers),
        "retokenised": sum(answer.retokenised for answer in answers.values()),
        "tokens": choices.positions,
        "not_chosen": choices.ties,
        "not_chosen_by_transformers": choices.own_ties,
        "largest_gap": choices.largest_gap,
        "sampled_tokens": len(unlikely),
        "surprise": draws.surprise if draws else None,
        **{f"p_of_{test}": chance for test, chance in p_by_test.items()},
    }
    return Finding(
        (*choices.faults, *tests), tuple(sorted(faulty)), numbers, tuple(outliers[:SHOWN]), tuple(unlikely[:SHOWN])
    )


def write_page(
    question: str, arms: Mapping[str, Finding], counts: Mapping[str, int | None], tokenizer: PreTrainedTokenizerBase
) -> str:
    """The page on the findings by arm. counts: by fault, the number of sampled tokens that reveal it."""

    def label(token: int) -> str:
        return f"{token} {tokenizer.decode([token])!r}".replace("|", "\\|")

    answers = arms["answers"]
    rows = [[key.replace("_", " "), *(_cell(arm.numbers.get(key)) for arm in arms.values())] for key in answers.numbers]
    oddest = [
        [name, str(token.line), str(token.position), label(token.token), label(token.likeliest), unit.format(token.off)]
        for name, arm in arms.items()
        for tokens, unit in ((arm.oddest, "{:.1f} rounding errors"), (arm.unlikeliest, "a chance of {:.1g}"))
        for token in tokens
    ]
    tried = most_tried(int(answers.numbers["sampled_tokens"] or 0))
    too_many = f"more than {tried:,}" if tried else "–"
    power = [[fault, too_many if count is None else f"{count:,}"] for fault, count in counts.items()]
    tables = (
        ("Numbers", ("", *arms), rows),
        ("The oddest tokens", ("arm", "line", "position", "token", "likeliest", "off by"), oddest),
        ("How many sampled tokens show a fault", ("fault", "tokens"), power),
    )
    if again := answers.numbers["retokenised"]:
        question += f" {again} answers came as text and were tokenised again: their tokens may not be those decoded."
    faults = [f"- {name}: {fault}" for name, arm in arms.items() for fault in arm.faults]
    lines = [f"# Audit: {answers.verdict}", "", question, "", *faults]
    for title, columns, content in tables:
        lines += ["", f"## {title}", "", *Table(dict.fromkeys(columns, ""), content).markdown()] if content else []
    return "\n".join(lines) + "\n"


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.2g}"

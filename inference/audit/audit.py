"""The audit: the target reads answers that were decoded elsewhere, teacher-forced, and judges each token.

A greedy token is judged as in an evaluation (`inference.measure.lossless`): how far is its logit below the best one?
The unit is the rounding error of transformers' own pass in the server's precision. Sampled tokens are tested as draws
from the target's distributions (`inference.audit.draws`).

    audit           reads or requests the answers, and writes the report
    score_answers   the target's reading of a file: an `AuditArm`, of the answers or of control answers
    judge_arm       the judgement of an arm: a `Finding`
    write_page      report.md

A reference (`lossless.Reference`) has the logits in twice the server's precision, the stock logits (of transformers'
own pass in that precision), and the noise (the rounding error of the stock logits). Control answers are the same
server's without drafting: if they have faults too, drafting is not the only cause.
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
from outrider.inference.audit.draws import SIMULATED, Draws, draws_of, most_tried, p_values, refute, tokens_needed
from outrider.inference.core.sampling import Sampler, invert
from outrider.inference.loading.models import load_reference
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.measure import lossless
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.settings.tools import AuditConfig

REPORT = "report.json"
MAX_LOGITS = 2**26  # most logits held at once; a text with more is read in parts, each with its beginning again
CHUNK_ROWS = 64  # rows of logits that are judged together in float64
SHOWN = 10  # tokens of a kind in report.md, at most


class JudgedToken(NamedTuple):
    """A token of an answer, as the target judges it."""

    line: int  # of the file of answers
    position: int  # in the answer
    token: int
    likeliest: int  # the likeliest token in its place
    # Of an outlier (see `AuditArm`): how far its logit is below the best logit, or beyond the cuts, in rounding errors.
    # Of another sampled token: the probability to draw a token that is no likelier.
    off: float


@dataclass(frozen=True)
class Finding:
    """The judgement of a file."""

    faults: tuple[str, ...]  # sentences
    at: tuple[JudgedToken, ...]  # the faulty tokens
    numbers: Mapping[str, float | None]  # the evidence by name
    oddest: tuple[JudgedToken, ...]  # the worst outliers (see `AuditArm`), at most `SHOWN`
    unlikeliest: tuple[JudgedToken, ...]  # the least likely sampled tokens, at most `SHOWN`

    @property
    def verdict(self) -> str:
        if self.at:
            locations = ", ".join(f"{token.line}:{token.position}" for token in self.at[:SHOWN])
            return f"{len(self.at)} tokens are faults: {locations}{', …' * (len(self.at) > SHOWN)} (line:position)"
        return "a fault over all tokens, at none alone" if self.faults else "only rounding"


@dataclass
class AuditArm:
    """The target's reading of a file of answers. Outliers are greedy tokens that are not the best, and sampled tokens
    that top_k, top_p or min_p exclude."""

    deviations: list[lossless.Deviation] = field(default_factory=list)  # a summary of each part's outliers
    outliers: list[JudgedToken] = field(default_factory=list)
    sampled: list[JudgedToken] = field(default_factory=list)  # without outliers
    draws: list[Draws] = field(default_factory=list)  # the statistics of `sampled`
    simulated: dict[str, list[Draws]] = field(default_factory=dict)  # by fault (as a wrong temperature), draws with it


def audit(config: AuditConfig) -> None:
    """Judge `config.answers`, write report.md and report.json to `config.out_dir`, and print report.md. Ends the
    process with status 1 if the answers have a fault. Raises `UserError` for bad input."""
    out_dir = require_writable(config.out_dir)
    with only_run_of(join_processes(), out_dir, "an audit", config.resume):
        expected = "a directory without an audit; resume=true judges anew, and asks a server what is missing"
        is_empty = not any((out_dir / file).exists() for file in ((REPORT, ANSWERS) if config.server else (REPORT,)))
        require(config.resume or is_empty, "out_dir", config.out_dir, expected)
        target = open_target(config.target, config.revision, by_layers=False)
        is_auto_dtype, device = config.dtype == "auto", pick_device(config.device)
        dtype = stored_dtype(target.config) if is_auto_dtype else pick_dtype(config.dtype, target.config, device)
        control_answers = {"control": read_answers(config.control, target)} if config.control else {}
        prompt_counts = request_answers(config, target, end_tokens(target), out_dir) if config.server else {}
        answers_by_arm = {"answers": read_answers(config.answers or str(out_dir / ANSWERS), target), **control_answers}
        findings, needed_by_fault = judge_answers(config, load_reference(target, dtype, device), answers_by_arm)
        findings["answers"] = replace(findings["answers"], numbers={**prompt_counts, **findings["answers"].numbers})
        question = f"Is {config.server or config.answers} what {config.target} says, decoded in {dtype}?"
        page_text = write_page(question, findings, needed_by_fault, target.tokenizer)
        write_atomically(out_dir / "report.md", page_text.encode())
        arm_reports = {name: asdict(finding) | {"verdict": finding.verdict} for name, finding in findings.items()}
        settings = config.decisions() | {"dtype": str(dtype), "target": config.target}
        write_json(out_dir / REPORT, {"settings": settings, "arms": arm_reports, "tokens_needed": needed_by_fault})
    print(page_text, flush=True)
    if findings["answers"].faults:
        print(f"error: not lossless: {findings['answers'].verdict}; see {out_dir}/report.md", file=sys.stderr)
        sys.exit(1)


def judge_answers(
    config: AuditConfig, model: PreTrainedModel, answers_by_arm: Mapping[str, Mapping[int, ServedAnswer]]
) -> tuple[dict[str, Finding], dict[str, int | None]]:
    """By arm ("answers", "control") the finding; and by fault, how many sampled tokens reveal it (`tokens_needed`)."""
    streams = Streams(config.seed).within("audit")
    arms = {
        name: score_answers(model, arm_answers, streams.within(name), simulate=name == "answers")
        for name, arm_answers in answers_by_arm.items()
    }
    findings = {name: judge_arm(arms[name], arm_answers, config.level) for name, arm_answers in answers_by_arm.items()}
    generator = torch.Generator().manual_seed(streams.number("power", bits=64))
    draws_by_fault = {fault: Draws.join(draw_parts) for fault, draw_parts in arms["answers"].simulated.items()}
    return findings, {fault: tokens_needed(draws, config.level, generator) for fault, draws in draws_by_fault.items()}


@torch.inference_mode()
def score_answers(
    model: PreTrainedModel, answers_by_line: Mapping[int, ServedAnswer], streams: Streams, *, simulate: bool = True
) -> AuditArm:
    """The reading of `answers_by_line` by `model`, the target run by transformers in the server's precision.

    simulate: also draw tokens as servers with a fault do.
    """
    arm, max_rows = AuditArm(), max(1, MAX_LOGITS // model.config.get_text_config().vocab_size)
    for line_number, answer in track_progress(answers_by_line.items(), "reading", "answers"):
        generator = torch.Generator().manual_seed(streams.number(line_number, bits=64))
        for start in range(0, len(answer.output_ids), max_rows):
            prompt, text = [*answer.prompt_ids, *answer.output_ids[:start]], answer.output_ids[start : start + max_rows]
            part = AnswerPart(line_number, start, answer, lossless.make_reference(model, prompt, text))
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
            return logits  # not rounded: `Sampler` computes in float32
        prompt_length = len(self.reference.prompt)
        all_ids = torch.tensor([*self.reference.prompt, *self.reference.text], device=logits.device)
        contexts = [all_ids[: prompt_length + row] for row in range(len(logits))]
        return sampler.scores(logits, contexts if sampler.reads_context else None)

    def tokens_at(self, rows: Tensor, best_ids: Tensor, distances: Tensor) -> list[JudgedToken]:
        """The judged tokens in `rows` [n]. best_ids [t]: the likeliest tokens; distances [n]: `JudgedToken.off`."""
        columns = (column.tolist() for column in (rows + self.start, self.tokens[rows, 0], best_ids[rows], distances))
        return [JudgedToken(self.line, *token_fields) for token_fields in zip(*columns, strict=True)]

    def off(self, measure: Callable[[Tensor], Tensor]) -> Tensor:
        """`measure` in units of the rounding errors [t]. If a distance would be a fault, above `lossless.GAP`, the unit
        is the largest error of readings in pieces of several lengths (`Reference.tipping_noise`)."""
        distances = measure(self.reference.logits_noise)  # `tipping_noise` gives (units of states, of logits)
        return measure(self.reference.tipping_noise()[1]) if bool((distances > lossless.GAP).any()) else distances


def _add_greedy(arm: AuditArm, part: AnswerPart) -> None:
    """Add greedy tokens to `arm`: those that are not the best become outliers."""
    scores, stock_scores = (part.scores(logits) for logits in (part.reference.logits, part.reference.stock_logits))
    best_tokens = scores.argmax(-1)
    missed_rows = (part.tokens[:, 0] != best_tokens).nonzero()[:, 0]
    distances = part.off(lambda noise: lossless.measure_regrets(scores, part.tokens, noise))[missed_rows]
    arm.outliers += part.tokens_at(missed_rows, best_tokens, distances)
    arm.deviations.append(_deviation(len(best_tokens), distances, int((stock_scores.argmax(-1) != best_tokens).sum())))


def _add_sampled(arm: AuditArm, part: AnswerPart, generator: torch.Generator, *, simulate: bool) -> None:
    """Add sampled tokens to `arm` as draws. A token that top_k, top_p or min_p exclude becomes an outlier. Its distance
    to the tokens that they keep is judged, as a greedy token's distance to the best."""
    scores, stock_scores = (part.scores(logits) for logits in (part.reference.logits, part.reference.stock_logits))
    allowed, best_tokens, tokens = scores.isfinite(), scores.argmax(-1), part.tokens
    inside, stock_outside = allowed.gather(-1, tokens)[:, 0], 0  # [t]; of transformers' logits, draws that are excluded
    for chunk in torch.arange(len(tokens), device=tokens.device).split(CHUNK_ROWS):
        log_p, log_q = (side[chunk].double().log_softmax(-1) for side in (scores, stock_scores))  # [rows, V]
        ids = invert(log_q.exp(), torch.rand(len(chunk), 1, dtype=torch.float64, generator=generator).to(log_p.device))
        stock_outside += int((~allowed[chunk].gather(-1, ids)).sum())
        if not len(rows := chunk[inside[chunk]]):
            continue
        log_p, log_q = log_p[inside[chunk]], log_q[inside[chunk]]
        tried = sum(len(draws.tail) for draws in next(iter(arm.simulated.values()), ()))
        drawn, by_fault = draws_of(log_p, log_q, tokens[rows, 0], generator, simulate=simulate and tried < SIMULATED)
        arm.draws.append(drawn)
        arm.sampled += part.tokens_at(rows, best_tokens, drawn.tail)
        for fault, draws in by_fault.items():
            arm.simulated.setdefault(fault, []).append(draws)
    rows = (~inside).nonzero()[:, 0]
    uncut_scores = part.scores(part.reference.logits, replace(part.answer, top_k=0, top_p=1.0, min_p=0.0))[rows]
    distances = part.off(
        lambda noise: measure_excess(part.answer, uncut_scores, tokens[rows], noise[rows] / part.answer.temperature)
    )
    arm.outliers += part.tokens_at(rows, best_tokens, distances)
    arm.deviations.append(_deviation(len(tokens), distances, stock_outside))


def measure_excess(config: SamplingConfig, scores: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
    """How far tokens [n, 1] are beyond the cuts of top_k, top_p and min_p, in units of noise [n]; 0 for kept ones.

    scores [n, V]: before these cuts, at the temperature. The distance is the smallest increase of the token's logit
    after which `Sampler` may keep it. top_k: the distance to the k-th likeliest. min_p: to the threshold. top_p: an
    increase s changes the log-odds of the probability before the token by s at most, and moves it ahead of tokens
    that are less than s better.
    """
    sorted_scores = scores.double().sort(-1, descending=True).values
    gaps = sorted_scores - scores.double().gather(-1, tokens)
    needed_shifts = [torch.zeros_like(gaps[:, 0])]
    if config.top_k:
        sorted_scores, gaps = sorted_scores[:, : config.top_k], gaps[:, : config.top_k]
        needed_shifts.append(gaps[:, -1])
    if config.top_p < 1:
        p = sorted_scores.softmax(-1)
        log_odds = (p.cumsum(-1) - p).clamp(0, 1).logit() - math.log(config.top_p / (1 - config.top_p))
        needed_shifts.append(torch.maximum(gaps, log_odds).amin(-1))
    if config.min_p:
        needed_shifts.append(gaps[:, 0] + math.log(config.min_p))
    return (torch.stack(needed_shifts).amax(0) / noise).clamp(0, lossless.WORST)


def _deviation(row_count: int, gaps: Tensor, stock_misses: int) -> lossless.Deviation:
    """The summary of a part. A server shows no keys and values, so only its choices are judged. gaps: of outliers;
    stock_misses: the number of other choices by the stock logits."""
    return lossless.Deviation(
        row_count, bulk=(0.0,), peak=0.0, peak_row=0, peak_position=0, gaps=tuple(gaps.tolist()), own_gaps=stock_misses
    )


def judge_arm(arm: AuditArm, answers_by_line: Mapping[int, ServedAnswer], significance: float) -> Finding:
    judgement, draws = lossless.judge_deviations(arm.deviations), Draws.join(arm.draws) if arm.draws else None
    first_token_rows = [row for row, token in enumerate(arm.sampled) if token.position == 0]  # for the test "beginning"
    p_by_test = p_values(draws, first_token_rows) if draws else {}
    failed_tests = refute(p_by_test, significance)
    outliers = sorted(arm.outliers, key=lambda token: -token.off)
    sampled = sorted(arm.sampled, key=lambda token: token.off)
    faulty = [token for token in outliers if token.off > lossless.GAP]
    if "unlikeliest" in failed_tests:
        faulty += [token for token in sampled if token.off * len(sampled) <= significance]  # Bonferroni's bound
    failures = (f"the drawn tokens fail the test `{name}` (p = {p_by_test[name]:.1g})" for name in failed_tests)
    evidence = {
        "answers": len(answers_by_line),
        "retokenised": sum(answer.retokenised for answer in answers_by_line.values()),
        "tokens": judgement.positions,
        "not_chosen": judgement.ties,
        "not_chosen_by_transformers": judgement.own_ties,
        "largest_gap": judgement.largest_gap,
        "sampled_tokens": len(sampled),
        "surprise": draws.surprise if draws else None,  # in standard deviations (see `draws`)
        **{f"p_of_{test}": p_value for test, p_value in p_by_test.items()},
    }
    return Finding(
        (*judgement.faults, *failures), tuple(sorted(faulty)), evidence, tuple(outliers[:SHOWN]), tuple(sampled[:SHOWN])
    )


def write_page(
    question: str, arms: Mapping[str, Finding], needed: Mapping[str, int | None], tokenizer: PreTrainedTokenizerBase
) -> str:
    """The page on the findings by arm. needed: by fault, the number of sampled tokens that reveal it."""

    def label(token_id: int) -> str:
        return f"{token_id} {tokenizer.decode([token_id])!r}".replace("|", "\\|")

    finding = arms["answers"]
    rows = [[key.replace("_", " "), *(_cell(arm.numbers.get(key)) for arm in arms.values())] for key in finding.numbers]
    oddest_rows = [
        [name, str(token.line), str(token.position), label(token.token), label(token.likeliest), fmt.format(token.off)]
        for name, arm in arms.items()
        for tokens, fmt in ((arm.oddest, "{:.1f} rounding errors"), (arm.unlikeliest, "a chance of {:.1g}"))
        for token in tokens
    ]
    max_simulated = most_tried(int(finding.numbers["sampled_tokens"] or 0))
    too_many_text = f"more than {max_simulated:,}" if max_simulated else "–"
    power_rows = [[fault, too_many_text if count is None else f"{count:,}"] for fault, count in needed.items()]
    tables = (
        ("Numbers", ("", *arms), rows),
        ("The oddest tokens", ("arm", "line", "position", "token", "likeliest", "off by"), oddest_rows),
        ("How many sampled tokens show a fault", ("fault", "tokens"), power_rows),
    )
    if again := finding.numbers["retokenised"]:
        question += f" {again} answers came as text and were tokenised again: their tokens may not be those decoded."
    fault_lines = [f"- {name}: {fault}" for name, arm in arms.items() for fault in arm.faults]
    lines = [f"# Audit: {finding.verdict}", "", question, "", *fault_lines]
    for title, header, body_rows in tables:
        lines += ["", f"## {title}", "", *Table(dict.fromkeys(header, ""), body_rows).markdown()] if body_rows else []
    return "\n".join(lines) + "\n"


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.2g}"

"""The audit: the target reads answers that were decoded elsewhere, teacher-forced, and each token is judged there.

A greedy token is judged as one of an evaluation (`inference.measure.lossless`): by how far it is below the best, in
units of what the target's own pass, by transformers in the server's precision, is off by. Sampled tokens are tested as
draws from the target's distributions (`inference.audit.draws`).
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draft_models.targets.open_target import open_target, pick_device, pick_dtype, stored_dtype
from inference.audit.answers import Answer, read_answers
from inference.audit.draws import Draws, draws_of, join, p_values, refused, surprise, tokens_needed
from inference.audit.page import SHOWN, Finding, Token, markdown
from inference.core.sampling import Sampler
from inference.loading.targets import load_plain
from inference.measure.lossless import GAP, Deviation, Reference, judge, make_reference, regrets
from inference.settings.audit import AuditConfig
from outrider.errors import require
from outrider.files import require_writable, write_atomically, write_json
from outrider.progress import counted
from outrider.run_dirs import only_run
from outrider.streams import Streams

REPORT = "report.json"
ROWS = 64  # of a text, that are looked at together in float64


@dataclass
class Arm:
    """What was found in the answers of a file.

    odd: greedy tokens that are not the best, and sampled ones that top_k, top_p or min_p leave out. sampled: all others
    that were sampled. simulated: draws of servers with a fault in their place, by fault.
    """

    deviations: list[Deviation] = field(default_factory=list)
    odd: list[Token] = field(default_factory=list)
    sampled: list[Token] = field(default_factory=list)
    draws: list[Draws] = field(default_factory=list)
    simulated: dict[str, list[Draws]] = field(default_factory=dict)


def audit(config: AuditConfig) -> None:
    """Judge `config.answers`, write report.md and report.json to `config.out_dir`, and print the first.

    Ends the process with status 1 where they have a fault. Raises `UserError` for bad input.
    """
    out_dir = require_writable(config.out_dir)
    with only_run(out_dir, "an audit"):
        expected = "a directory without an audit; resume=true makes it anew"
        require(config.resume or not (out_dir / REPORT).exists(), "out_dir", config.out_dir, expected)
        target = open_target(config.target, config.revision, by_layers=False)
        files = {arm: file for arm, file in (("answers", config.answers), ("control", config.control)) if file}
        answers = {arm: read_answers(file, target) for arm, file in files.items()}
        auto, device = config.dtype == "auto", pick_device(config.device)
        dtype = stored_dtype(target.config) if auto else pick_dtype(config.dtype, target.config, device)
        model, streams = load_plain(target, dtype, device), Streams(config.seed).within("audit")
        arms = {arm: read(model, answers[arm], streams.within(arm)) for arm in files}
        found = {arm: judged(arms[arm], answers[arm], config.level) for arm in files}
        coins = torch.Generator().manual_seed(streams.number("power", bits=64))
        simulated = {fault: join(parts) for fault, parts in arms["answers"].simulated.items()}
        needed = {fault: tokens_needed(draws, config.level, coins) for fault, draws in simulated.items()}
        question = f"Is {config.answers} what {config.target} says, decoded in {dtype}?"
        page = markdown(question, found, needed, target.tokenizer)
        write_atomically(out_dir / "report.md", page.encode())
        findings = {arm: asdict(one) | {"verdict": one.verdict} for arm, one in found.items()}
        settings = config.deciding() | {"dtype": str(dtype), "target": config.target}
        write_json(out_dir / REPORT, {"settings": settings, "arms": findings, "tokens_needed": needed})
    print(page, flush=True)
    if found["answers"].faults:
        print(f"error: not lossless: {found['answers'].verdict}; see {out_dir}/report.md", file=sys.stderr)
        sys.exit(1)


@torch.inference_mode()
def read(model: PreTrainedModel, answers: Mapping[int, Answer], streams: Streams) -> Arm:
    """What `model`, the target as transformers runs it in the server's precision, says of the answers."""
    arm = Arm()
    for line, answer in counted(answers.items(), "reading", "answers"):
        reference = make_reference(model, answer.prompt_ids, answer.output_ids)
        scores, own = (_scores(answer, logits) for logits in (reference.logits, reference.own_logits))
        tokens = torch.tensor(answer.output_ids, device=scores.device)[:, None]
        if answer.temperature == 0:
            _take_greedy(arm, line, reference, scores, own, tokens)
        else:
            coins = torch.Generator().manual_seed(streams.number(line, bits=64))
            _take_sampled(arm, line, reference, scores, own, tokens, coins)
    return arm


def _scores(answer: Answer, logits: Tensor) -> Tensor:
    """What the tokens of an answer are chosen by [t, V], from the logits [t, V] before each of them."""
    sampler = Sampler(answer)
    if sampler.greedy and not sampler.reads_context:
        return logits  # in all of their precision
    text = torch.tensor([*answer.prompt_ids, *answer.output_ids], device=logits.device)
    before = [text[: len(answer.prompt_ids) + place] for place in range(len(logits))]
    return sampler.scores(logits, before if sampler.reads_context else None)


def _take_greedy(arm: Arm, line: int, reference: Reference, scores: Tensor, own: Tensor, tokens: Tensor) -> None:
    best, off = scores.argmax(-1), regrets(scores, tokens, reference.logits_noise)
    if float(off.max()) > GAP:
        off = regrets(scores, tokens, reference.tipping_noise()[1])
    rows = (tokens[:, 0] != best).nonzero()[:, 0]
    arm.odd += _named(line, rows, tokens, best, off[rows])
    arm.deviations.append(_deviation(len(tokens), off[rows], int((own.argmax(-1) != best).sum())))


def _take_sampled(
    arm: Arm, line: int, reference: Reference, scores: Tensor, own: Tensor, tokens: Tensor, coins: torch.Generator
) -> None:
    """What top_k, top_p or min_p leave out is judged as greedy tokens are, by the last token that they keep."""
    kept, best, logits = scores.isfinite(), scores.argmax(-1), reference.logits
    inside = kept.gather(-1, tokens)[:, 0]
    rows = (~inside).nonzero()[:, 0]
    pairs = torch.stack([logits.where(kept, torch.inf).amin(-1), logits.gather(-1, tokens)[:, 0]], -1)
    off = regrets(pairs, torch.ones_like(tokens), reference.logits_noise)
    arm.odd += _named(line, rows, tokens, best, off[rows])
    arm.deviations.append(_deviation(len(tokens), off[rows], len(rows)))
    for rows in filter(len, inside.nonzero()[:, 0].split(ROWS)):
        log_p, rounded = (part[rows].double().log_softmax(-1) for part in (scores, own))
        drawn, simulated = draws_of(log_p, rounded, tokens[rows, 0], coins)
        arm.draws.append(drawn)
        arm.sampled += _named(line, rows, tokens, best, drawn.tail)
        for fault, draws in simulated.items():
            arm.simulated.setdefault(fault, []).append(draws)


def _named(line: int, rows: Tensor, tokens: Tensor, best: Tensor, off: Tensor) -> list[Token]:
    columns = (column.tolist() for column in (rows, tokens[rows, 0], best[rows], off))
    return [Token(line, *values) for values in zip(*columns, strict=True)]


def _deviation(positions: int, gaps: Tensor, own_gaps: int) -> Deviation:
    """Of a server no keys and values are seen, so that its choices alone are judged."""
    return Deviation(positions, (0.0,), 0.0, 0, 0, tuple(gaps.tolist()), own_gaps)


def judged(arm: Arm, answers: Mapping[int, Answer], level: float) -> Finding:
    """The judgement of an arm."""
    choices, draws = judge(arm.deviations), join(arm.draws) if arm.draws else None
    chances = p_values(draws) if draws else {}
    against = refused(chances, level)
    odd = sorted(arm.odd, key=lambda token: -token.off)
    unlikely = sorted(arm.sampled, key=lambda token: token.off)
    at = [token for token in odd if token.off > GAP]
    if "unlikeliest" in against:
        at += [token for token in unlikely if token.off * len(unlikely) <= level]
    tests = (f"the drawn tokens fail the test `{name}` (p = {chances[name]:.1g})" for name in against)
    numbers = {
        "answers": len(answers),
        "retokenised": sum(bool(answer.text) for answer in answers.values()),
        "tokens": choices.positions,
        "not_chosen": choices.ties,
        "not_chosen_by_transformers": choices.own_ties,
        "largest_gap": choices.largest_gap,
        "sampled_tokens": len(unlikely),
        "surprise": surprise(draws) if draws else None,
        **{f"p_of_{test}": chance for test, chance in chances.items()},
    }
    return Finding((*choices.faults, *tests), tuple(sorted(at)), numbers, tuple(odd[:SHOWN]), tuple(unlikely[:SHOWN]))

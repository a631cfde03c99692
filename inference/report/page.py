"""report.html: one self-contained file with its styles and script, without external resources.

This module chooses what is on the page. page.html, a jinja2 template, has the markup and escapes every text. The page
shows some texts round by round (`_texts`); a round is one pass of the target. For each round the page has the committed
tokens as text, the first rejected tokens, and for the script the draft's tree: [tokens, parents, accepted nodes, the
target's own tokens].
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outrider.inference.core.tree import ROOT
from outrider.inference.measure.results import PromptResult, ShownRound
from outrider.inference.report import sentences, served, tables
from outrider.inference.report.types import NOT_LOSSLESS, TARGET_DIFFERS, MethodReport

HERE = Path(__file__).parent
PROMPT_END = 3000  # characters at the end of a prompt that are shown
REJECTED = 8  # rejected tokens shown in the text; the tree has all of them
PARTS = ("draft", "verify", "structure", "other")  # of a round's time; structure: the drafter's work outside passes
# The CSS class of each verdict.
VERDICTS = {name: name for name in ("faster", "slower", "undecided")} | {NOT_LOSSLESS: "wrong", TARGET_DIFFERS: "wrong"}
Decode = Callable[[Sequence[int]], str]


def make_page(
    reports: Sequence[MethodReport],
    results: Sequence[PromptResult],
    decode: Decode,
    plots: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The page of one evaluation, with all text escaped, so that a model's output is safe.

    decode: token ids → text, special tokens included. plots: by what they show, as SVG. The arguments of `render` are
    the variables of page.html. judged: the rounding errors of arms (methods, baselines); resolution: the faults too
    small for them; doctor: findings on drafters; overlaps: prompts seen in training, by kind of drafter; gained:
    verdicts, speed-ups, τ; whole: times with the prefill.
    """
    first_report, conditions, names = reports[0], reports[0].conditions, [report.method for report in reports]
    methods_text = f"{len(names)} methods" if len(names) > 3 else " and ".join(names)
    speed_table, answer_table = tables.methods_tables(reports)
    style, script = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    loader = FileSystemLoader(HERE)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("page.html").render(
        title=f"Outrider: how fast {methods_text} decode {conditions.model}",
        style=style, script=script, verdicts=VERDICTS, parts=PARTS, plots=plots,
        busy=conditions.load.warnings(conditions.device), conditions=sentences.conditions_text(reports),
        verdict=sentences.write_recommendation(reports), sentences=sentences.write_sentences(reports),
        gained=speed_table, whole=answer_table,
        counted=tables.counted_table(reports), served=served.served_table(reports), wrong=sentences.wrong_arms(reports),
        engine=next((row.engine for report in reports for row in report.served or ()), ""),
        times=[*map(_times, reports)], categories=tables.category_tables(reports),
        texts=_texts([result for result in results if result.shown], decode),
        lossless=first_report.lossless, judged=tables.judged_table(reports), first=first_report, run=conditions,
        doctor=[*sentences.doctor_lines(conditions)], resolution=sentences.describe_resolution(conditions),
        same=min(report.lossless.identical for report in reports),
        same_as_plain=min(report.lossless.identical_to_plain for report in reports),
        overlaps=[sentences.overlap_sentence(kind, overlap) for kind, overlap in conditions.overlap.items()],
    )  # fmt: skip


def _times(report: MethodReport) -> tuple[str, list[tuple[str, float, str]]]:
    """The method, and the share of each part of a round in the decoding time: in percent, and as a text."""
    total_seconds = sum(report.seconds.values()) or 1.0  # "other" is a difference: below 0 it counts as 0
    percentages = ((part, 100 * max(0.0, report.seconds[part]) / total_seconds) for part in PARTS)
    return report.method, [(part, round(percent, 2), f"{part} {percent:.0f} %") for part, percent in percentages]


class Pieces:
    """Texts of single tokens. by_token: the texts that `of` gave.

    The text of a token depends on the tokens before it: it may be a part of a character, or lose a leading space.
    """

    def __init__(self, decode: Decode, anchor: int):
        """anchor: any token; a single token is decoded after it."""
        self._decode, self._anchor = decode, anchor
        self._anchor_length = len(decode([anchor]))
        self.by_token: dict[int, str] = {}

    def of(self, token: int) -> str:
        """The text of one token after the anchor."""
        if token not in self.by_token:
            self.by_token[token] = self._decode([self._anchor, token])[self._anchor_length :]
        return self.by_token[token]

    def split(self, tokens: Sequence[int]) -> list[str]:
        """The text of `tokens` in a part for each token. A part is empty while its last character is incomplete."""
        token_texts, shown_length = [], 0
        for end in range(1, len(tokens) + 1):
            text = self._decode(tokens[:end])
            is_complete = end == len(tokens) or not text.endswith("\ufffd")
            token_texts.append(text[shown_length:] if is_complete else "")
            shown_length = len(text) if is_complete else shown_length
        return token_texts


def _texts(results: Sequence[PromptResult], decode: Decode) -> Mapping[str, object] | None:
    """All texts with recorded rounds, and their trees for the script, both by NUMBER/METHOD; None without any."""
    if not results:
        return None
    pieces = Pieces(decode, results[0].answer[0])  # any token serves as the anchor
    trees, text_articles = dict[str, list[list[object]]](), []
    for number, result in enumerate(results):
        for method, rounds in result.shown.items():
            text_articles.append((f"{number}/{method}", _rounds(rounds, pieces)))
            trees[f"{number}/{method}"] = [_tree(r, pieces) for r in rounds]
    prompts = [{"id": r.prompt_id, "category": r.category, "asked": decode(r.prompt)[-PROMPT_END:]} for r in results]
    script_data = {"trees": trees, "pieces": {str(token): text for token, text in pieces.by_token.items()}}
    return {"prompts": prompts, "methods": list(results[0].shown), "articles": text_articles, "data": script_data}


def _rounds(rounds: Sequence[ShownRound], pieces: Pieces) -> list[Mapping[str, object]]:
    """The rounds of one text, each with its committed tokens and the first rejected ones."""
    token_texts, rows = iter(pieces.split([token for r in rounds for token in r.tokens])), list[Mapping[str, object]]()
    for number, r in enumerate(rounds):
        texts = [next(token_texts) for _ in r.tokens]
        title = f"round {number}: {len(r.drafted)} drafted, {r.accepted} accepted" if number else "the prefill"
        rejected = "".join(map(pieces.of, rejected_tokens(r)))
        rows.append({"title": title, "rejected": rejected, "accepted": texts[: r.accepted], "own": texts[r.accepted :]})
    return rows


def rejected_tokens(r: ShownRound) -> list[int]:
    """The first rejected tokens: from the last accepted node along the first children, at most `REJECTED`."""
    node, tokens = r.path[-1] if r.path else ROOT, list[int]()
    while len(tokens) < REJECTED and node in r.parents:
        node = r.parents.index(node)  # its first child
        tokens.append(r.drafted[node])
    return tokens


def _tree(r: ShownRound, pieces: Pieces) -> list[object]:
    """Data for the script: tokens, parents and accepted nodes of the draft, and the target's own tokens."""
    corrections = list(r.tokens[r.accepted :])
    for token in (*r.drafted, *corrections):
        pieces.of(token)  # fills `by_token`, which the script shows
    return [r.drafted, r.parents, r.path, corrections]

"""The generated texts, token by token, and their draft trees."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from inference.core.tree import ROOT
from inference.measure.results import PromptResult, ShownRound
from inference.report.page.markup import Markup, embedded, joined, tag

ASKED = 3000  # number of a prompt's last characters that are shown
REJECTED = 8  # rejected tokens shown in the text; the tree has all of them

Decode = Callable[[Sequence[int]], str]


class Pieces:
    """Texts of single tokens. A token that holds part of a character or a space depends on the tokens before it."""

    def __init__(self, decode: Decode, anchor: int):
        self._decode, self._anchor = decode, anchor
        self._before = len(decode([anchor]))
        self.known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """The text of one token after the `anchor`, an arbitrary token."""
        if token not in self.known:
            self.known[token] = self._decode([self._anchor, token])[self._before :]
        return self.known[token]

    def along(self, tokens: Sequence[int]) -> list[str]:
        """The text split by token; the parts concatenate to the text."""
        parts, said = [], 0
        for end in range(1, len(tokens) + 1):
            text = self._decode(tokens[:end])
            whole = end == len(tokens) or not text.endswith("\ufffd")
            parts.append(text[said:] if whole else "")
            said = len(text) if whole else said
        return parts


def texts_section(results: Sequence[PromptResult], decode: Decode) -> Markup:
    """All texts with recorded rounds, shown one at a time, and the data of their trees for the script."""
    shown = [result for result in results if result.shown]
    if not shown:
        return tag("p", "No rounds were kept (show_prompts=0).")
    pieces = Pieces(decode, shown[0].answer[0])
    trees: dict[str, list[list[object]]] = {}
    articles = []
    for number, result in enumerate(shown):
        for method, rounds in result.shown.items():
            name = f"{number}/{method}"
            articles.append(tag("article", *_text(rounds, pieces), id=name, class_="shown", data_text=name))
            trees[name] = [_tree(r, pieces) for r in rounds]
    methods = list(shown[0].shown)
    asked = [
        tag("details", tag("summary", "What was asked: ", result.prompt_id), tag("pre", decode(result.prompt)[-ASKED:]),
            class_="asked", data_prompt=number)
        for number, result in enumerate(shown)
    ]  # fmt: skip
    said = {str(token): text for token, text in pieces.known.items()}
    return joined(
        tag("p", _choice("prompt", {str(n): f"{r.category}: {r.prompt_id}" for n, r in enumerate(shown)}), " ",
            _choice("method", {name: name for name in methods}), class_="choose"),
        _LEGEND, *asked, *articles,
        tag("aside", tag("p", "Click on the text to see what was drafted there."), id="tree", aria_live="polite"),
        embedded({"trees": trees, "pieces": said}, id="rounds"),
    )  # fmt: skip


_LEGEND = tag(
    "p",
    tag("span", "drafted and accepted", class_="accepted"), " ",
    tag("del", "drafted and rejected"), " ",
    tag("span", "the target's own token", class_="own"), " ",
    tag("label", tag("input", type="checkbox", id="rejected", checked=True), " show what was rejected"),
    class_="legend",
)  # fmt: skip


def _choice(name: str, options: Mapping[str, str]) -> Markup:
    made = [tag("option", label, value=value) for value, label in options.items()]
    return tag("label", f"{name} ", tag("select", *made, id=f"choose-{name}"))


def _text(rounds: Sequence[ShownRound], pieces: Pieces) -> Iterator[Markup]:
    """The rounds of one text, each with its committed tokens and the first rejected ones."""
    parts = iter(pieces.along([token for r in rounds for token in r.tokens]))
    for number, r in enumerate(rounds):
        own = [next(parts) for _ in r.tokens]
        accepted = [tag("span", text, class_="accepted") for text in own[: r.accepted]]
        rejected = "".join(map(pieces.of, rejected_tokens(r)))
        yield tag(
            "span",
            *accepted,
            tag("del", rejected) if rejected else "",
            *(tag("span", text, class_="own") for text in own[r.accepted :]),
            class_="round", role="button", tabindex=0, data_round=number,
            title=f"round {number}: {len(r.drafted)} drafted, {r.accepted} accepted" if number else "the prefill",
        )  # fmt: skip


def rejected_tokens(r: ShownRound) -> list[int]:
    """The drafted tokens after the accepted path, along each node's first child: the rest of a chain."""
    node = r.path[-1] if r.path else ROOT
    found: list[int] = []
    while len(found) < REJECTED:
        child = next((i for i, parent in enumerate(r.parents) if parent == node and i not in r.path), None)
        if child is None:
            break
        found.append(r.drafted[child])
        node = child
    return found


def _tree(r: ShownRound, pieces: Pieces) -> list[object]:
    """Data for the script: tokens, parents and accepted nodes of the draft, and the target's own tokens."""
    own = list(r.tokens[r.accepted :])
    for token in (*r.drafted, *own):
        pieces.of(token)
    return [r.drafted, r.parents, r.path, own]

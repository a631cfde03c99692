"""HTML from untrusted text: everything except `Markup` is escaped, in one place."""

import html
import json

from outrider.tables import Table

CLASSES = {name: name for name in ("faster", "slower", "undecided")}  # of verdicts
CLASSES |= dict.fromkeys(("not lossless", "target differs"), "wrong")
_VOID = ("input", "meta")  # elements without an end tag


class Markup(str):
    """A string of trusted HTML, inserted unescaped."""

    __slots__ = ()


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """An element. content: all but `Markup` is escaped; attributes by name, `class_` for class; None leaves one out."""
    said = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{said}>" if name in _VOID else f"<{name}{said}>{joined(*content)}</{name}>")


def joined(*content: object) -> Markup:
    """The parts concatenated; all but `Markup` is escaped."""
    return Markup("".join(one if isinstance(one, Markup) else html.escape(str(one)) for one in content))


def as_table(table: Table) -> Markup:
    """A table; the tooltip of a column's name is the column's description. On a phone every cell has its name."""
    names = (tag("abbr", name, title=said, tabindex=0) if said else name for name, said in table.columns.items())
    header = tag("thead", tag("tr", *(tag("th", name) for name in names)))
    cells = (zip(table.columns, row, strict=True) for row in table.rows)
    rows = (
        tag(
            "tr",
            *(
                tag("td", text, class_=CLASSES.get(text, "whole" if text.endswith("]") else None), data_name=name)
                for name, text in row
            ),
        )
        for row in cells
    )
    return tag("div", tag("table", header, tag("tbody", *rows)), class_="scroll")


def embedded(value: object, **attributes: object) -> Markup:
    """JSON for the page's script, escaped so that no text can close the script element."""
    plain = json.dumps(value, separators=(",", ":"))
    for sign in "<>&":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return tag("script", Markup(plain), type="application/json", **attributes)

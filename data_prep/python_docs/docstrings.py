"""Docstrings → plain English: whole paragraphs of prose, without markup, signatures and code."""

import inspect
import re

_SECTION = re.compile(
    r"(?:Parameters|Args|Arguments|Attributes|Returns?|Yields?|Raises|Notes?|Warnings?|See Also|References|Shape|Usage"
    r"|Keyword [Aa]rg\w*|Examples?|Explanation|Methods|Inputs?|Outputs?|Warns)\s*:?\s*(?:\n|$)",
    re.IGNORECASE,
)
_SIGNATURE = re.compile(r"[\w.]+\([^\n]*\)?(?:\s*->\s*[^\n]*)?$")
_ROLE = re.compile(r":[a-zA-Z:]+:`[~!]?([^`<]+?)(?:\s*<[^`>]*>)?`")
_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)  # of a list
_HYPHEN = re.compile(r"(?<=\w)-\n\s*(?=\w)")  # at a line end
_LITERAL = re.compile(r"``([^`]+)``")
_LINK = re.compile(r"\[?`[.~]?([\w.]+(?:\(\))?)`\]?")  # [`Name`], `.Name`
_QUOTED_NAME = re.compile(r'(?<!\w)"(\w+(?:\.\w+)*(?:\(\))?)"(?!\w)')  # as the language reference marks names
# A sentence ends where the next begins with a capital letter or a name, except after an abbreviation.
_SENTENCE_END = re.compile(r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)(?<!\bcf\.)(?<!\betc\.)(?<=[.!?])\s+(?=[A-Z`])")
# Signs that text is not prose, or meaningless outside its page: markup, addresses, private names, code, references.
_NOT_PROSE = re.compile(
    r"""[\\{}$|^~\#@*] | :: | \.\. | >>> | <\w | <- | [=-]> | -- | [+\-/=]{2} | ,None | XXX | `_ | %\( | :\w+: | https?:
    | \[\d+\] | ['"]\s+['"] | \b0x[0-9a-f]{4} | (?<![\w.`])_+[a-z] | \._[a-z] | \b(?:see\ the|(?:see|in|and)\ section)\b
    | \b(?:TODO|PEP|RFC|version|deprecated|above|below|following|this\ section|chapter|internal|undocumented)\b""",
    re.IGNORECASE | re.VERBOSE,
)
_CUT_OFF = re.compile(r"\b(?:a|an|and|are|as|at|by|defined|follows|for|from|has|in|is|of|on|or|than|that|the|to|with)$")
_PAIRS = (("(", ")"), ("[", "]"))


def prose(docstring: str) -> list[str]:
    """The leading paragraphs of prose of a docstring, each on one line, up to the first code, list or section."""
    found: list[str] = []
    for number, block in enumerate(_blocks(docstring)):
        paragraph = plain(block)
        heading = _SECTION.match(block) or re.search(r"\n[-=~*^]{3,}\s*$", block) or "\n---" in block
        if heading or block[0].isspace() or "\n " in block or _ITEM.search(block):
            break
        if number == 0 and paragraph[-1].isalnum() | (paragraph[-1] in ")`") and not _CUT_OFF.search(paragraph):
            paragraph += "."  # a headline
        if not _is_prose(paragraph):
            break
        found.append(paragraph)
    return found


def first_prose(text: str) -> list[str]:
    """The first consecutive paragraphs of prose in a page that may begin with code."""
    blocks = _blocks(text)
    starts = (number for number, block in enumerate(blocks) if _is_prose(plain(block)))
    return prose("\n\n".join(blocks[next(starts, len(blocks)) :]))


def first_sentence(paragraphs: list[str]) -> str:
    """The first sentence; "" without paragraphs."""
    return sentences(paragraphs[0])[0] if paragraphs else ""


def sentences(text: str) -> list[str]:
    """`text` split into sentences."""
    return _SENTENCE_END.split(text)


def quoted(paragraphs: list[str], most: int) -> str:
    """As many whole paragraphs as fit into `most` characters; if the first one does not fit, whole sentences of it."""
    for parts, between in ((paragraphs, "\n\n"), (sentences(paragraphs[0]) if paragraphs else [], " ")):
        texts = (between.join(parts[:count]) for count in range(len(parts), 0, -1))
        for text in texts:
            if len(text) <= most:
                return text
    return ""


def plain(block: str) -> str:
    """A paragraph on one line, with names in single backticks."""
    text = _ROLE.sub(r"`\1`", " ".join(_HYPHEN.sub("-", block).split()))
    text = _LITERAL.sub(r"`\1`", text)
    text = _LINK.sub(r"`\1`", text)
    return _QUOTED_NAME.sub(r"`\1`", text)


def _blocks(docstring: str) -> list[str]:
    """The blocks between blank lines, without leading signatures."""
    lines = inspect.cleandoc(docstring).split("\n")
    while lines and (not lines[0].strip() or _SIGNATURE.match(lines[0].strip())):
        del lines[0]
    return [block for block in re.split(r"\n\s*\n", "\n".join(lines).rstrip()) if block.strip()]


def _is_prose(paragraph: str) -> bool:
    begins = re.match(r"[A-Z`]", paragraph) is not None
    ends = paragraph[-1:] in ".!?"
    balanced = all(paragraph.count(a) == paragraph.count(b) for a, b in _PAIRS)
    paired = paragraph.count("`") % 2 == 0 and paragraph.count('"') % 2 == 0
    return begins and ends and balanced and paired and not _NOT_PROSE.search(paragraph.replace("...", ""))

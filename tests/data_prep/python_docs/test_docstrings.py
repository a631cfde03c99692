"""Docstrings as prose: what is quoted is whole, and has neither markup nor code in it."""

import re

import pytest

from data_prep.python_docs.docstrings import first_prose, prose, quoted, sentences

WHOLE = """add(first, second) -> int

    Return the :class:`~numbers.Number` that is ``first`` plus [`second`].

    Both are read once, e.g. from a list. Neither is changed.

    >>> add(1, 2)
    3

    This speaks of the example.
    """


def test_signatures_go_markup_becomes_backticks_and_code_ends_it():
    assert prose(WHOLE) == [
        "Return the `numbers.Number` that is `first` plus `second`.",
        "Both are read once, e.g. from a list. Neither is changed.",
    ]


@pytest.mark.parametrize(
    "end",
    [
        "Parameters\n----------\nx : int",
        "Args:\n    x: a number",
        "Returns:\n    A number.",
        "Explanation\n===========\nMore of it.",
        ".. note:: Take care.",
        "    indented = 1",
        "There are two:\n- one thing.\n- another thing.",
        "1. This first.\n2. That second.",
        "It is at <object at 0x7f0012345678>.",
        "It uses _private_helper for that.",
        "It ends with a colon:",
        "It is (not closed.",
        "It has `one backtick.",
        "and begins in the middle.",
        "Use \\alpha for that.",
    ],
)
def test_nothing_after_what_is_no_prose(end):
    assert prose(f"The first thing.\n\n{end}\n\nThe last thing.") == ["The first thing."]


def test_a_headline_gets_its_full_stop_unless_it_is_cut_off():
    assert prose("Return the sum of `x`") == ["Return the sum of `x`."]
    assert prose("The simple form is equivalent to\n\n    if x: pass") == []
    assert prose("A headline.\n\nNo sentence of its own") == ["A headline."]


def test_a_word_may_be_cut_at_the_end_of_a_line():
    assert prose("The limit is platform-\ndependent.") == ["The limit is platform-dependent."]


def test_a_page_may_begin_with_code():
    assert first_prose("   x = 1\n\nThis is said.\n\nAnd this.\n\n   y = 2\n\nNot this.") == [
        "This is said.",
        "And this.",
    ]
    assert first_prose("   x = 1") == []


def test_what_is_quoted_is_whole_and_short():
    paragraphs = ["One is here. Two is here.", "Three is here."]
    whole = "\n\n".join(paragraphs)
    for most in range(len(whole) + 5):
        text = quoted(paragraphs, most)
        assert len(text) <= most
        assert whole.startswith(text)
        assert text == "" or text.endswith(".")
    assert quoted(paragraphs, len(whole)) == whole
    assert quoted(paragraphs, 15) == "One is here."


def test_sentences_do_not_end_at_shortenings():
    assert sentences("Use one, e.g. Path. It is old, i.e. Unix. `x` is new.") == [
        "Use one, e.g. Path.",
        "It is old, i.e. Unix.",
        "`x` is new.",
    ]
    assert " ".join(sentences(WHOLE)) == re.sub(r"(?<=\.)\s+(?=[A-Z])", " ", WHOLE)

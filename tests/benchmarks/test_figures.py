"""Every figure of the pages is that of the committed JSON, and a figure that is changed is found."""

import re

import pytest

ENTRIES = [
    {"words": "made # [#, #] of # tokens", "from": ["file['speed']", "file['counts'][0]"]},
    {"words": "seed 7 of `a9`", "because": "a setting"},
]
FILE = {"file": {"speed": {"median": 1.256, "ci95": [1.1, 1.449]}, "counts": [1234]}}


def figures(page: str) -> list[re.Match[str]]:
    """The decimal fractions of a page's sentences and tables."""
    code = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
    away, places = (
        [found.span() for found in code.finditer(page)],
        re.finditer(r"(?<![\w.])\d{1,3}\.\d+(?![\w.])", page),
    )
    return [one for one in places if not any(low <= one.start() < high for low, high in away)]


def test_pages_have_the_figures_of_the_record() -> None:
    from figures import records
    from fill_tables import check_all, pages

    assert check_all(pages(), records()) == [], "run benchmarks/fill_tables.py --check"


def test_json_files_are_made_of_the_committed_data() -> None:
    """Verdicts and figures of the papers of their counts, those of records of their raw data; anybody may make others.
    So one figure or one second that is changed is found."""
    from figures import RESULTS, records
    from fill_tables import differences, raw_data

    known = records()
    raw = raw_data(known)
    assert differences(known, raw) == [], "run benchmarks/paper.py PAPER --judge, or bench_real.py … --again"
    other = {**known["paper_gsd"]["entries"]["smollm2"], "prompts": 1}
    assert differences({"paper_gsd": {"paper": "gsd", "entries": {"smollm2": other}}}, {})
    turn, *turns = known["batch_cpu"]["turns"]
    first, *others = turn["first"]
    changed = {**known["batch_cpu"], "turns": [{**turn, "first": [first + 1.0, *others]}, *turns]}
    assert len(differences({"batch_cpu": changed}, {})) == 1
    arms = known["trainers_cpu"]["entries"]["5 minutes of heads"]["arms"]
    (first, *others), *texts = (own := arms["outrider_eagle3"])["rounds"]
    own = {**own, "rounds": [[[first[0] + 1, *first[1:]], *others], *texts]}
    assert len(differences({"trainers_cpu": {"entries": {"5": {"arms": {**arms, "outrider_eagle3": own}}}}}, {})) == 1
    assert all(file.stat().st_size < 2**20 for file in RESULTS.glob("*.raw.json.gz"))
    timed = {name for name, record in known.items() if "paper" not in record for entry in record.get("entries", {})
             if any("end_to_end" in arm for arm in record["entries"][entry].get("arms", {}).values())}  # fmt: skip
    assert all(f"`{name}.json`" in (RESULTS / "README.md").read_text() for name in timed - {*raw})


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])  # of those that are to be complete
def test_a_changed_figure_is_found(name: str) -> None:
    """In a sentence, in a table of JSON, and in one that is compared figure by figure."""
    from figures import records
    from fill_tables import check_all, pages

    page, known = pages()[name], records()
    kinds: dict[str, list[re.Match[str]]] = {"sentence": [], "row": [], "filled": []}
    for one in figures(page):
        line = page[page.rfind("\n", 0, one.start()) + 1 :]
        filled = page.count(": begin -->", 0, one.start()) > page.count(": end -->", 0, one.start())
        kinds["filled" if filled else "row" if line.startswith("|") else "sentence"].append(one)
    assert all(kinds[kind] for kind in kinds if (name, kind) != ("README.md", "filled"))
    for found in kinds.values():
        for one in found[:: len(found) // 4 + 1]:
            other = page[: one.end() - 1] + str((int(one[0][-1]) + 5) % 10) + page[one.end() :]
            assert check_all({name: other}, known), one


def test_a_figure_agrees_to_the_digits_that_are_shown_and_has_a_source() -> None:
    from figures import check

    page = "It made 1.26 [1.10,\n1.45] of 1,234 tokens, seed 7 of `a9`. H100, 7B, EAGLE-3, [arXiv](x_2.md) 2406.03853."
    assert check(page, ENTRIES, FILE, complete=True) == []
    assert "1.45" in check(page.replace("1.45", "1.44"), ENTRIES, FILE, complete=True)[0]
    assert check(page.replace("1.26", "1.3"), ENTRIES, FILE, complete=True) == []
    assert check(page.replace("1,234", "1,235"), ENTRIES, FILE, complete=True)
    assert "3 has no source" in check(f"{page} 3 more", ENTRIES, FILE, complete=True)[0]
    assert check(f"{page} 3 more", ENTRIES, FILE, complete=False) == []
    assert len(check(page.replace("seed 7", "seed 8"), ENTRIES, FILE, complete=True)) == 2
    assert "not on the page: made #" in check(page.replace("made", "took"), ENTRIES, FILE, complete=False)[0]
    assert check(page, [{**ENTRIES[0], "from": ["file['speed']"]}, ENTRIES[1]], FILE, complete=True)  # one is missing


def test_an_interval_that_no_file_has_is_found() -> None:
    from figures import intervals, records
    from fill_tables import check_all

    found = [*intervals([{"a": [{"ratio": 1.256, "ci95": [1.1, 1.449]}, {"mean": 2.0, "ci95": None}]}])]
    assert found == [("1.26", "1.10", "1.45")]
    known = records()
    for ratio, wrong in (("1.54× [1.44, 2.07]", 0), ("1.54× [1.44, 2.08]", 1)):
        assert len(check_all({"docs/x.md": f"| x | {ratio} |"}, known)) == wrong
    with pytest.raises(ValueError, match="nobody"):
        check_all({"docs/x.md": "<!-- nobody table: begin -->\n<!-- nobody table: end -->"}, known)

"""The page's section on losslessness: the checks, and their limits."""

from collections.abc import Sequence

from inference.report.lossless_report import is_lossless, judgements, resolution, target_differs
from inference.report.page.markup import Markup, as_table, tag
from inference.report.wording import Report


def most_that_differ(checked: int, chance: float = 0.05) -> float:
    """The upper confidence bound on the share of differing prompts if none of `checked` prompts differs.

    With a share s all n are equal with probability (1 − s)ⁿ; the bound is the s where this equals `chance`.
    """
    return 1 - chance ** (1 / checked)


def proof_section(reports: Sequence[Report]) -> list[Markup]:
    """Paragraphs: the comparison of texts, the bound it gives, and the judgement of rounding errors."""
    first = reports[0]["lossless"]
    wrong = [report["method"] for report in reports if not is_lossless(report)]
    wrong = ["the target's own run, plain decoding,"] if target_differs(reports[0]) else wrong
    said = [_verdict(wrong), *(_compared(reports) if first["checked"] else _sampled())]
    judged = judgements(reports)
    if judged is not None:
        said.append(
            "In half precision, and when sampling, two correct programs may part where two tokens are nearly as "
            "likely; and the text of an int8 model may be that of the floats it is made from. So every method was "
            "taken through the reference's text again, and all that it computed on the way was compared with the "
            "target in twice the precision. The unit is what transformers rounds there. " + resolution(reports[0])
        )
    paragraphs = [tag("p", text, class_="wrong" if wrong and text == said[0] else None) for text in said]
    return paragraphs + ([] if judged is None else [as_table(judged)])


def _verdict(wrong: Sequence[str]) -> str:
    if wrong:
        return f"No: {', '.join(wrong)} said something else than the target alone. Their speed means nothing."
    return "Nothing was found that says otherwise."


def _compared(reports: Sequence[Report]) -> list[str]:
    first = reports[0]["lossless"]
    checked, against = first["checked"], str(first["reference"]).replace("_", " ")
    same = min(report["lossless"]["identical"] for report in reports)
    said = [f"{checked} texts of every method were compared with those of {against}, token by token."]
    if same == checked:
        said.append(
            f"All are the same. Of other prompts like these, at most {100 * most_that_differ(checked):.1f} % can "
            "differ: with more than that, no difference here would have been a luck of less than 5 %. That it is none "
            "at all is not a matter of luck: a draft only proposes, and the target's own choice decides every token."
        )
    return said


def _sampled() -> list[str]:
    return [
        "The texts were sampled, so they may differ. What must be the same is their distribution: how likely each "
        "text is. That is proven in the project's tests, by going through every random choice on small vocabularies."
    ]

"""The only list of the stop rules, which end a draft. inference/stopping has the rules themselves.

`python docs/make_options.py` makes the help of the options, conf/stop and the table in docs/when-to-stop.md from it.
The calibration head is a small network that estimates whether a drafted token is accepted.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RuleEntry:
    """A stop rule.

    factory: "module:name" of what makes it, its class or a function, of (most tokens or levels, `StopConfig`,
    `RuleInputs`: measured costs, streams, the calibration head); ".module" is in inference/stopping.
    condition: under which it drafts another token; {threshold} stands for the default.
    threshold: the default of stop.threshold, between 0 and 1; None: the rule has none. bounds: what ends a draft
    at the threshold. needs_head: the rule asks the calibration head. by_costs: the rule weighs the tokens of a chain,
    at most LONGEST_CHAIN, against measured costs. paper: its number on arXiv.
    """

    factory: str
    condition: str
    threshold: float | None = None
    bounds: str = ""
    needs_head: bool = False
    by_costs: bool = False
    paper: str = ""


RULES: dict[str, RuleEntry] = {
    "survival": RuleEntry(
        ".by_costs:make_survival",
        "further tokens are expected to save time, by measured costs and q, or with `stop.score=head` the head",
        by_costs=True,
    ),
    "fixed": RuleEntry(".interface:FixedLength", "the draft has fewer than `stop.max_draft` tokens"),
    "confidence": RuleEntry(
        ".rules:Confidence",
        "the token's probability is at least {threshold} (transformers' rule)",
        threshold=0.4,
        bounds="a smaller probability of the token",
    ),
    "adaedl": RuleEntry(
        ".rules:AdaEDL",
        "1 − √(γ · entropy of q) is above a threshold that follows the acceptance; γ is `stop.gamma`",
        threshold=0.5,
        bounds="a smaller bound of it",
        paper="2410.18351",
    ),
    "svip": RuleEntry(
        ".rules:SVIP",
        "√entropy of q is at most {threshold}",
        threshold=0.6,
        bounds="a larger √entropy",
        paper="2411.18462",
    ),
    "rejection_risk": RuleEntry(
        ".rules:RejectionRisk",
        "the probability that at least one token of the draft is wrong is at most {threshold} (SpecDec++)",
        threshold=0.7,
        bounds="a larger risk that a token is wrong",
        needs_head=True,
        paper="2405.19715",
    ),
    "beta": RuleEntry(
        ".rules:BetaThompson",
        "a random draw from the Beta posterior of the acceptance says so (Thompson sampling, EESD)",
        paper="2406.03853",
    ),
    "calibrated": RuleEntry(
        ".rules:CalibratedThompson",
        "as `beta`, with the head's estimate in the posterior (EESD)",
        needs_head=True,
        paper="2406.03853",
    ),
    "posterior_mean": RuleEntry(
        ".rules:PosteriorMean",
        "the mean of the posterior of `calibrated` is at least {threshold}",
        threshold=0.5,
        bounds="a smaller mean",
        needs_head=True,
    ),
}
THRESHOLDS = {name: entry.threshold for name, entry in RULES.items() if entry.threshold is not None}

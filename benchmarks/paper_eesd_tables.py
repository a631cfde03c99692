"""What EESD's paper says (arXiv 2406.03853): its tables about stop rules and trees, and what it claims by them."""

from dataclasses import dataclass

EXITS_ONLY = "the calibration head belongs to an early exit"


@dataclass(frozen=True)
class Row:
    """A line of a table. method: in the report of its drafter; paper: its cells there, by column."""

    label: str
    method: str
    paper: tuple[str, ...]
    drafter: str = "main"
    never: str = ""  # why it can run on no target


@dataclass(frozen=True)
class Claim:
    """The paper: `better` is faster than `worse`, both "method" or "drafter/method"; hm: its HM is higher too."""

    better: str
    worse: str
    hm: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the paper. columns: of the paper's own figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]


WIDE = ("70B Gsm8k", "70B XSum", "13B Gsm8k", "13B XSum")
TABLES = {
    "table_4": Table(
        "Table 4: what each part is worth (LLaMA-2-13B, HM in parentheses)",
        ("Gsm8k", "XSum"),
        (
            Row("vanilla SD, K = 10 (the paper: TinyLLaMA-1.1B)", "vanilla", ("1.19×", "1.05×")),
            Row("EESD, Beta-TS", "eesd_beta", ("1.91× (57.22)", "1.84× (55.46)")),
            Row("– without exit layer", "eesd_beta", ("1.18× (23.69)", "1.15× (23.10)"), "no_layer"),
            Row("– without self-distillation", "eesd_beta", ("1.82× (54.12)", "1.73× (51.84)"), "open_data"),
            Row("EESD, Cali-TS", "eesd_cali", ("2.04× (58.97)", "1.92× (56.45)")),
            Row("– without sampling prediction", "eesd_cali_model", ("1.82× (54.03)", "1.78× (53.49)")),
            Row("– without model prediction", "eesd_cali_sample", ("1.88× (57.10)", "1.82× (55.38)")),
            Row("EESD, K = 10", "eesd_fixed", ("1.66× (44.76)", "1.58× (41.77)")),
        ),
        (
            Claim("eesd_beta", "vanilla"),
            Claim("eesd_beta", "no_layer/eesd_beta", hm=True),
            Claim("eesd_beta", "open_data/eesd_beta", hm=True),
            Claim("eesd_beta", "eesd_fixed", hm=True),
            Claim("eesd_cali", "eesd_beta", hm=True),
            Claim("eesd_cali", "eesd_cali_model", hm=True),
            Claim("eesd_cali", "eesd_cali_sample", hm=True),
        ),
    ),
    "table_5": Table(
        "Table 5: the stop rules on other drafters (EESD's own rows: Tables 1 and 4)",
        WIDE,
        (
            Row("EESD, K = 10", "eesd_fixed", ("–", "–", "1.66×", "1.58×")),
            Row("EESD, Beta-TS", "eesd_beta", ("2.13×", "1.80×", "1.91×", "1.84×")),
            Row("EESD, Cali-TS", "eesd_cali", ("2.29×", "1.86×", "2.04×", "1.92×")),
            Row("vanilla SD, K = 10 (the paper: LLaMA-2-7B)", "vanilla", ("1.88×", "1.46×", "0.96×", "0.77×")),
            Row("vanilla SD, Beta-TS", "vanilla_beta", ("2.02×", "1.67×", "0.99×", "0.85×")),
            Row("vanilla SD, Cali-TS", "", ("–",) * 4, never=EXITS_ONLY),
            Row("self-speculation, K = 10", "skip_fixed", ("1.37×", "1.23×", "1.37×", "1.35×")),
            Row("self-speculation, Beta-TS", "skip_beta", ("1.44×", "1.25×", "1.41×", "1.40×")),
            Row("self-speculation, Cali-TS", "", ("–",) * 4, never=EXITS_ONLY),
        ),
        (
            Claim("eesd_beta", "eesd_fixed"),
            Claim("eesd_cali", "eesd_beta"),
            Claim("vanilla_beta", "vanilla"),
            Claim("skip_beta", "skip_fixed"),
        ),
    ),
    "table_7": Table(
        "Table 7: tree attention",
        WIDE,
        (
            Row("EESD, Beta-TS", "eesd_beta", ("2.13×", "1.80×", "1.91×", "1.84×")),
            Row("– with a tree", "eesd_tree_beta", ("2.31×", "1.91×", "2.04×", "1.89×")),
            Row("EESD, Cali-TS", "eesd_cali", ("2.29×", "1.86×", "2.04×", "1.92×")),
            Row("– with a tree", "eesd_tree_cali", ("2.48×", "1.96×", "2.18×", "2.12×")),
        ),
        (Claim("eesd_tree_beta", "eesd_beta"), Claim("eesd_tree_cali", "eesd_cali")),
    ),
}


# ------------------------------------------------------------------------------------------------------------ measuring

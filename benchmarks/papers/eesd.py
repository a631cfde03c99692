"""EESD, early exits with Thompson sampling (arXiv 2406.03853): its tables and figures.

Speed-ups need --timed. Without it, the claims on v_d, r_d and their harmonic mean HM are judged. Self-speculation skips
the layers that `choose_skip.py` chooses, on other prompts. Table 4 needs further drafters, as folders of --ablation.
train/eesd.py trains three of them by the paper's recipe; they differ in one option: mixed, no_layer
(`train_layer=false`) and open_data (the open data alone). paper_head is the drafter of --checkpoint with the paper's
calibration head (train/calibrate.py odds=false), which sees only hidden states.
"""

import json
from pathlib import Path
from typing import Any

from choose_skip import choose_for

from outrider.base.errors import require
from outrider.base.files import write_json
from outrider.draft_models.calibration import META_FILE as CALIBRATION
from outrider.draft_models.early_exit.checkpoint import META_FILE, read_meta
from outrider.inference.drafters.model_plugin import head_identity
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from papers.claims import Claim, Row, Table

ARXIV = "2406.03853"
SOURCES = ("early_exit",)
FIXED = 10  # K of Tables 4 and 5, and the longest draft of every rule
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)  # K of Fig. 3
FEW = 6  # nodes of a tree as costs choose them on two cores: the mean of `eesd_tree_auto` in smollm2_mixed.json
NO_HEAD = "the drafter has no calibration head; run train/calibrate.py checkpoint=E"
NO_ABLATION = "needs the folder {} in --ablation (see benchmarks/papers/eesd.py)"
NO_CHECKPOINT = "self-speculation has no checkpoint that a calibration head could lie in"
TABLE_6 = """of its hardware. The half that needs none: for LLaMA-2-70B `train/eesd.py plan=true` says 5.66 B parameters
read and 1.12 B trained (the paper: 5.6 B and 1.12 B), and a step that runs the whole target takes 1.92 to 2.08 times as
long on a CPU, with far smaller targets (the paper: 13 and 5.9 times); benchmarks/results/speed.md""".replace("\n", " ")
RECIPE, PAPERS_HEAD = "EESD by the paper's recipe, Beta-TS", "EESD, Cali-TS, the paper's head"
CALI, CALI_FASTER = "Cali-TS beats Beta-TS (HM)", "Cali-TS beats Beta-TS (speed-up)"
SHOWN = ("hm", "acceptance", "draft_share", "tau", "per_round", "speedup")


def chain(rule: str, source: str = "early_exit", longest: int = FIXED, **settings: Any) -> MethodConfig:
    own = {"skip": settings.pop("skip")} if "skip" in settings else {}
    return MethodConfig(source=source, stop=StopConfig(rule=rule, max_draft=longest, **settings), **own)  # type: ignore[arg-type]


def tree(rule: str, temperature: float = 0.5, nodes: int = 25) -> MethodConfig:
    """As early_exit/opt_tree/STOP with delta=0: the rule says how many levels the tree gets.

    temperature: of q, which ranks.
    """
    shape = StructureConfig(kind="opt_tree", nodes=nodes, delta=0.0, temperature=temperature)
    return MethodConfig(structure=shape, stop=StopConfig(rule=rule))  # type: ignore[arg-type]


def tables(*, options: Any, **_: Any) -> dict[str, Table]:
    """Every table and figure of the paper, by key."""
    no_head = lacks_head("early_exit", options.checkpoint)
    note = f"The head of Cali-TS sees {which_head(options.checkpoint)}." if options.checkpoint and not no_head else ""
    return {
        "tables_1_3": baselines(no_head, note),
        "table_4": ablation(no_head, note, options.ablation),
        "table_5": other_drafters(options),
        "table_6": Table("Table 6: training efficiency", never=TABLE_6),
        "table_7": trees(no_head, note),
        "table_8": breakdown(no_head, note),
        "figure_3": lengths(no_head, note),
    }


def lacks_head(source: str, where: str | None) -> str:
    """The reason why the drafter in `where` has no calibration head; empty if it has one, or if none is given."""
    return NO_HEAD if where and head_identity(KINDS[source], where) is None else ""


def baselines(no_head: str, head: str) -> Table:
    """By prompts, give GSM8K, XSum, HumanEval or MT-Bench as --prompts, with --shot for the paper's 1-shot prompts."""
    return Table(
        "Tables 1 to 3 and 10 to 13: EESD and plain speculative decoding (LLaMA-2-13B)",
        (*SHOWN, "predicted"),
        (
            Row("vanilla SD, K = 10", chain("fixed", "small_lm"),
                paper=("84.6, 75.6", "0.96×, 0.77×", "87.3, 0.97×", "90.0, 1.02×")),
            Row("EESD, Beta-TS", chain("beta"), paper=("57.2, 55.5", "1.91×, 1.84×", "61.4, 2.08×", "62.2, 2.03×")),
            Row("EESD, Cali-TS", chain("calibrated"), never=no_head,
                paper=("59.0, 56.5", "2.04×, 1.92×", "62.9, 2.15×", "64.3, 2.11×")),
            Row("Medusa", paper=("31.7, 25.0", "1.77×, 1.53×", "26.7, 1.61×", "43.1, 1.89×"),
                never="Medusa's heads are no drafter of this project"),
        ),
        (
            Claim("Cali-TS has a higher HM than Beta-TS", "hm", ("EESD, Beta-TS", "EESD, Cali-TS"), of=CALI),
            Claim("and is faster", "speedup", ("EESD, Beta-TS", "EESD, Cali-TS"), of=CALI_FASTER),
            Claim("EESD beats vanilla SD with K = 10", "speedup", ("vanilla SD, K = 10", "EESD, Beta-TS")),
        ),
        ("HM, GSM8K and XSum", "speed-up", "HumanEval", "MT-Bench"),
        note=f"The paper's small LM is LLaMA-2-7B. {head}".strip(),
    )  # fmt: skip


def which_head(where: str | Path) -> str:
    """What the calibration head of the early exit in `where` sees, in words."""
    path = Path(where) / CALIBRATION
    ours = json.loads(path.read_text()).get("odds", True) if path.exists() else True
    return "hidden states and the draft's log-odds, which is more than the paper's" if ours else "what the paper's sees"


def ablation(no_head: str, head: str, folder: str | None) -> Table:
    """Table 4. Three drafters follow the paper's recipe; the one of --checkpoint may follow a better one."""

    def of(name: str) -> dict[str, str]:
        where = Path(folder or "") / name
        return {"other": str(where)} if folder and where.is_dir() else {"never": NO_ABLATION.format(name)}

    papers_head = of("paper_head")
    if "other" in papers_head:
        require(which_head(papers_head["other"]) != which_head(""), "ablation", papers_head["other"],
                "a head of train/calibrate.py odds=false")  # fmt: skip
    model_alone = chain("calibrated", evidence="model")
    rows = (
        Row(RECIPE, chain("beta"), paper=("57.22, 55.46", "1.91×, 1.84×"), **of("mixed")),
        Row("– without exit layer", chain("beta"), paper=("23.69, 23.10", "1.18×, 1.15×"), **of("no_layer")),
        Row("– without self-distillation", chain("beta"), paper=("54.12, 51.84", "1.82×, 1.73×"), **of("open_data")),
        Row("EESD, Beta-TS", chain("beta"), paper=("57.22, 55.46", "1.91×, 1.84×")),
        Row("EESD, Cali-TS", chain("calibrated"), paper=("58.97, 56.45", "2.04×, 1.92×"), never=no_head),
        Row("– without sampling prediction", model_alone, paper=("54.03, 53.49", "1.82×, 1.78×"), never=no_head),
        Row("– without model prediction", chain("calibrated", evidence="sample"),
            paper=("57.10, 55.38", "1.88×, 1.82×"), never=no_head),
        Row(PAPERS_HEAD, chain("calibrated"), paper=("58.97, 56.45", "2.04×, 1.92×"), **papers_head),
        Row("– without sampling prediction, the paper's head", model_alone, paper=("54.03, 53.49", "1.82×, 1.78×"),
            **papers_head),
        Row("EESD, K = 10", chain("fixed"), paper=("44.76, 41.77", "1.66×, 1.58×")),
    )  # fmt: skip
    order = [
        ("the exit layer is worth much", "– without exit layer", RECIPE),
        ("self-distillation is worth something", "– without self-distillation", RECIPE),
        ("Beta-TS beats K = 10", "EESD, K = 10", "EESD, Beta-TS"),
    ]
    for said, cali in (("", "EESD, Cali-TS"), (", the paper's head", PAPERS_HEAD)):
        order += [
            (f"Cali-TS beats Beta-TS{said}", "EESD, Beta-TS", cali),
            (f"both predictions beat the model's alone{said}", f"– without sampling prediction{said}", cali),
            (f"both predictions beat the samples' alone{said}", "– without model prediction", cali),
        ]
    claims = [
        Claim(
            f"{said} ({label})",
            name,
            (worse, better),
            of=f"{said.partition(',')[0]} ({label})",
            ours=better == "EESD, Cali-TS",
        )
        for said, worse, better in order
        for name, label in (("hm", "HM"), ("speedup", "speed-up"))
    ]
    return Table(
        "Table 4: what each part is worth (LLaMA-2-13B; GSM8K, XSum)", SHOWN, rows, tuple(claims), ("HM", "speed-up"),
        note=" ".join(filter(None, (trained_how(folder), head))),
    )  # fmt: skip


def trained_how(folder: str | None) -> str:
    """A sentence on the training data of the three drafters that follow the paper's recipe."""
    where = Path(folder or "") / "mixed"
    if not folder or not (where / META_FILE).exists():
        return ""
    meta = read_meta(where)
    batch = f"{meta.training['fit']['batch_rows']} rows of {meta.training['seq_len']} tokens"
    words = f"{meta.draft_vocabulary} tokens" if meta.draft_vocabulary else "all tokens"
    return (
        f"Those by the recipe learned in {meta.training['steps']} steps of {batch} and draft {words}: little. The "
        "paper's learned from 100,000 texts, 64 in a step, and draft all tokens."
    )


def skipped_layers(options: Any) -> tuple[int, ...]:
    """The layers that self-speculation leaves out: given, or chosen once and kept in skip.json."""
    if options.skip:
        return tuple(options.skip)
    path = options.work / "skip.json"
    if not path.exists():
        prompts = options.prompts[0].partition("=")[2]
        write_json(path, choose_for(options.target, prompts, options.num_prompts, 3, 48))
    return tuple(json.loads(path.read_text())["skip"])


def other_drafters(options: Any) -> Table:
    wanted = not options.tables or "table_5" in options.tables
    skip = skipped_layers(options) if wanted and options.target else None
    paper = {"vanilla": ("1.88×, 1.46×", "0.96×, 0.77×"), "vanilla beta": ("2.02×, 1.67×", "0.99×, 0.85×"),
             "skip": ("1.37×, 1.23×", "1.37×, 1.35×"), "skip beta": ("1.44×, 1.25×", "1.41×, 1.40×")}  # fmt: skip
    pairs = {
        "vanilla SD": (chain("fixed", "small_lm"), chain("beta", "small_lm"), paper["vanilla"], paper["vanilla beta"]),
        "self-speculation": (chain("fixed", "skip_layers", skip=skip), chain("beta", "skip_layers", skip=skip),
                             paper["skip"], paper["skip beta"]),
    }  # fmt: skip
    headed = {
        "vanilla SD": Row(
            "vanilla SD, Cali-TS", chain("calibrated", "small_lm"), never=lacks_head("small_lm", options.small_lm)
        ),
        "self-speculation": Row("self-speculation, Cali-TS", never=NO_CHECKPOINT),
    }
    rows, claims = [], []
    for name, (fixed, beta, of_fixed, of_beta) in pairs.items():
        rows += [Row(f"{name}, K = 10", fixed, paper=of_fixed), Row(f"{name}, Beta-TS", beta, paper=of_beta),
                 headed[name]]  # fmt: skip
        ends = (f"{name}, K = 10", f"{name}, Beta-TS")
        claims += [
            Claim(f"Beta-TS is faster than K = 10 ({name})", "speedup", ends, of="and on other drafters"),
            Claim(f"Beta-TS has a higher HM than K = 10 (not printed there; {name})", "hm", ends, ours=True),
        ]
    return Table(
        "Table 5: Thompson sampling on other drafters (GSM8K, XSum)",
        SHOWN,
        tuple(rows),
        tuple(claims),
        ("70B speed-up", "13B speed-up"),
    )


def trees(no_head: str, head: str) -> Table:
    small = f", with a tree of {FEW} nodes"
    rows = (
        Row("EESD, Beta-TS", chain("beta"), paper=("2.13×, 1.80×", "1.91×, 1.84×")),
        Row("EESD, Beta-TS, with a tree", tree("beta"), paper=("2.31×, 1.91×", "2.04×, 1.89×")),
        Row("EESD, Beta-TS, with a tree, sharper q", tree("beta", 0.2)),
        Row(f"EESD, Beta-TS{small}", tree("beta", nodes=FEW), paper=("2.31×, 1.91×", "2.04×, 1.89×")),
        Row("EESD, Cali-TS", chain("calibrated"), paper=("2.29×, 1.86×", "2.04×, 1.92×"), never=no_head),
        Row("EESD, Cali-TS, with a tree", tree("calibrated"), paper=("2.48×, 1.96×", "2.18×, 2.12×"), never=no_head),
        Row(f"EESD, Cali-TS{small}", tree("calibrated", nodes=FEW), paper=("2.48×, 1.96×", "2.18×, 2.12×"),
            never=no_head),
    )  # fmt: skip
    claims = []
    for said, name in (("is faster", "speedup"), ("accepts more a round", "tau")):
        for size, which in (("", ", with a tree"), (f" of {FEW} nodes", small)):
            claims += [Claim(f"a tree{size} {said} (EESD, {rule})", name, (f"EESD, {rule}", f"EESD, {rule}{which}"),
                             of=f"a tree {said}") for rule in ("Beta-TS", "Cali-TS")]  # fmt: skip
    sharper = ("EESD, Beta-TS", "EESD, Beta-TS, with a tree, sharper q")
    claims.append(Claim("a tree accepts more a round where q is sharper (EESD, Beta-TS)", "tau", sharper, ours=True))
    note = (
        f"Trees have 25 nodes, or {FEW}: as many as costs chose on two cores, on other prompts. They rank by q at "
        f"temperature 0.5, the sharper one at 0.2. {head}"
    )
    return Table("Table 7: tree attention", SHOWN, rows, tuple(claims), ("70B speed-up", "13B speed-up"), note=note)


def breakdown(no_head: str, head: str) -> Table:
    rows = (
        Row("EESD, Beta-TS", chain("beta"), paper=("5.517, 3.656", "25.203, 7.986", "0.017, 0.014", "4.076, 0.526")),
        Row("EESD, Cali-TS", chain("calibrated"), never=no_head,
            paper=("5.022, 3.436", "24.106, 7.392", "0.426, 0.355", "4.023, 0.507")),
    )  # fmt: skip
    less = {"drafting_per_token": "drafts", "verifying_per_token": "verifies", "milliseconds": "decodes"}
    claims = [Claim(f"Cali-TS {does} in less time a token", name, ("EESD, Cali-TS", "EESD, Beta-TS"))
              for name, does in less.items()]  # fmt: skip
    claims.append(Claim("but its rule takes more", "deciding_per_token", ("EESD, Beta-TS", "EESD, Cali-TS")))
    title = "Table 8: where the time goes (seconds of 200 texts of XSum)"
    columns = ("drafting, 70B, 13B", "verification", "sampling", "others")
    return Table(title, (*less, "deciding_per_token"), rows, tuple(claims), columns, note=head)


def lengths(no_head: str, head: str) -> Table:
    fixed = [Row(f"K = {k}", chain("fixed", longest=k), x=k, line="K") for k in LENGTHS]
    rules = (Row("Beta-TS", chain("beta")), Row("Cali-TS", chain("calibrated"), never=no_head))
    claims = [Claim(f"Beta-TS {does} {row.name} ({by})", name, (row.name, "Beta-TS"), ours=True)
              for name, does, by in (("modelled", "is faster than", "modelled"), ("hm", "beats", "HM"))
              for row in fixed]  # fmt: skip
    claims += [Claim(f"Beta-TS is faster than {row.name}", "speedup", (row.name, "Beta-TS"),
                     of="Beta-TS is faster than every K") for row in fixed]  # fmt: skip
    claims.append(Claim("Cali-TS is faster than Beta-TS", "speedup", ("Beta-TS", "Cali-TS"), of=CALI_FASTER))
    return Table(
        "Fig. 3: the length of drafts",
        ("modelled", *SHOWN),
        (*fixed, *rules),
        tuple(claims),
        plot="modelled",
        xlabel="K",
        note="The paper has curves of speed-up only, so HM and the modelled speed-up are ours. Modelled: a draft step "
        f"takes 0.1, and a verifying pass 1.1, of the time of plain decoding's pass. {head}".strip(),
    )

"""The papers' tables on tiny models: what is replayed is what is decoded, what is counted and judged is right."""

import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_models.settings import EARLY_EXIT, SMALL_LM, TARGET
from draft_models.target.stack import LayerStack
from inference.decode import autoregressive
from inference.method_settings import MethodConfig, StopConfig, StructureConfig
from inference.settings import SamplingConfig
from inference.structures.token_graph import GraphTree
from inference.tree import OptimalTree
from tests.tiny import open_stack, random_prompt, save_target

Counts = dict[str, float]


# ------------------------------------------------------------------------------------------------------------ replaying


STRUCTURES = {
    "chain": StructureConfig(),
    "opt_tree": StructureConfig(kind="opt_tree", nodes=12, delta=0.0, max_depth=4),
    "token_graph": StructureConfig(kind="token_graph", nodes=20, tau=1, theta_prob=0.0, theta_sibling=0.0),
    "k_config": StructureConfig(kind="k_config", widths=(3, 2)),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayerStack, LayerStack]:
    """A target, and a small LM that often decodes as it does."""
    folder = tmp_path_factory.mktemp("pair")
    _, stack = open_stack(save_target(folder, peak=6.0))
    _, small = open_stack(folder)
    for weight in small.parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return stack, small


@pytest.mark.parametrize(("kind", "eos"), [("chain", False), *((kind, True) for kind in STRUCTURES)])
def test_replayed_rounds_are_those_of_decoding(pair: tuple[LayerStack, LayerStack], kind: str, eos: bool) -> None:
    """Also where the text ends early; and all that is watched of them."""
    from papers.claims import Row
    from papers.measuring import Asked, Bench, continued, counts_of

    stack, small = pair
    ids = tuple(random_prompt(12))
    answer = [token for r in autoregressive(stack, ids, max_new_tokens=20) for token in r.tokens]
    ends = {answer[15]} if eos else set()
    answer = [token for r in autoregressive(stack, ids, max_new_tokens=20, eos=ends) for token in r.tokens]
    bench = Bench(stack, {"small_lm": small}, stack.config.vocab_size, 20, ends)
    row = Row(kind, MethodConfig(source="small_lm", structure=STRUCTURES[kind]))
    asked = Asked("p", "c", ids, tuple(answer))
    replayed, live = continued(bench, row, asked), continued(bench, row, asked, live=True)
    assert replayed.tokens == live.tokens == tuple(answer)
    assert counts_of(replayed) == counts_of(live)
    assert counts_of(live)["accepted"] > 0


def test_prompts_are_measured_whole_until_the_time_is_over(pair: tuple[LayerStack, LayerStack], tmp_path: Path) -> None:
    """A prompt on which a row is missing counts for no row; the same call goes on."""
    from papers.claims import Row, Table
    from papers.measuring import Asked, Bench, by_row, key_of, measure_all, read_counts

    stack, small = pair
    bench = Bench(stack, {"small_lm": small}, stack.config.vocab_size, 4)
    rows = tuple(Row(f"K = {k}", MethodConfig(source="small_lm", stop=StopConfig(max_draft=k))) for k in (1, 2))
    rows = (*rows, Row("K = 1, b only", rows[0].method, category="b"))
    asked = []
    for place, category in enumerate("ab"):
        ids = tuple(random_prompt(6, place))
        answer = [token for r in autoregressive(stack, ids, max_new_tokens=4) for token in r.tokens]
        asked.append(Asked(f"p{place}", category, ids, tuple(answer)))
    table = Table("t", rows=rows)
    measure_all(bench, [table], asked, tmp_path, minutes=0, timed_prompts=0)
    assert {prompt for _, prompt in read_counts(tmp_path)} == {"p0"}
    measure_all(bench, [table], asked, tmp_path, minutes=None, timed_prompts=0)
    found = by_row(table, asked, tmp_path)
    assert {name: set(counts) for name, counts in found.items()} == {
        "K = 1": {"p0", "p1"}, "K = 2": {"p0", "p1"}, "K = 1, b only": {"p1"}}  # fmt: skip
    kept = [line for line in (tmp_path / "counts.jsonl").read_text().splitlines(keepends=True)
            if json.loads(line)["key"] != key_of(rows[1]) or json.loads(line)["prompt"] == "p0"]  # fmt: skip
    (tmp_path / "counts.jsonl").write_text("".join(kept))
    assert {name: set(counts) for name, counts in by_row(table, asked, tmp_path).items()} == {
        "K = 1": {"p0"}, "K = 2": {"p0"}, "K = 1, b only": set()}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- judging


def rows_of(*names: str) -> dict[str, Any]:
    from papers.claims import Row

    return {name: Row(name, MethodConfig(source="prompt_lookup")) for name in names}


def measured(**taus: list[float]) -> dict[str, dict[str, Counts]]:
    """By row, τ of every prompt, in ten rounds each."""
    return {
        row: {f"p{place}": {"tokens": 10 * tau, "rounds": 10.0} for place, tau in enumerate(values)}
        for row, values in taus.items()
    }


MANY = [2.0, 2.1, 1.9, 2.05, 1.95, 2.2]


@pytest.mark.parametrize(
    ("kind", "bound", "terms", "taus", "verdict"),
    [
        ("rises", 0, "ab", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "holds"),
        ("rises", 0, "ba", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "does not hold"),
        ("rises", 0, "ab", {"a": MANY, "b": MANY[::-1]}, "undecided"),
        ("rises", 0, "ab", {"a": MANY[:4], "b": [x + 0.5 for x in MANY[:4]]}, "undecided"),  # too few
        ("rises", 0, "abc", {"a": MANY, "b": [x - 1 for x in MANY], "c": [x + 1 for x in MANY]}, "does not hold"),
        ("level", 0.1, "ab", {"a": MANY, "b": [x * 1.05 for x in MANY]}, "holds"),
        ("level", 0.1, "ab", {"a": MANY, "b": [x * 1.5 for x in MANY]}, "does not hold"),
        ("peaks", 0, "aba", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "holds"),
        ("peaks", 0, "bab", {"a": MANY, "b": [x + 0.5 for x in MANY]}, "does not hold"),
        ("above", 1.5, "a", {"a": MANY}, "holds"),
        ("below", 1.5, "a", {"a": MANY}, "does not hold"),
    ],
)
def test_claims_by_hand(kind: Any, bound: float, terms: str, taus: dict[str, list[float]], verdict: str) -> None:
    from papers.claims import Claim, judge

    found = judge(Claim("said", "tau", tuple(terms), kind, bound), rows_of(*taus), measured(**taus))
    assert found["verdict"] == verdict
    means = {row: sum(values) / len(values) for row, values in taus.items()}
    assert found["values"] == pytest.approx([means[row] for row in terms])


def test_a_claim_is_scaled_reads_other_quantities_and_draws_conversations() -> None:
    from papers.claims import Claim, judge

    rows, counts = rows_of("a", "b"), measured(a=MANY, b=[3 * x for x in MANY])
    assert judge(Claim("twice", "tau", ("b", "a"), scale=(1, 2)), rows, counts)["verdict"] == "does not hold"
    assert judge(Claim("four times", "tau", ("b", "a"), scale=(1, 4)), rows, counts)["verdict"] == "holds"
    for own in counts.values():
        for place, each in enumerate(own.values()):
            each.update(tried=10.0, rank_1=5.0, rank_2=2.0 + place % 2)
    found = judge(Claim("more", "", ("a@alpha_1", "a@alpha_2")), rows, counts)
    assert found["values"] == pytest.approx([0.5, 0.75])
    turns = {"a": {f"{n // 2}/turn{n % 2}": {"tokens": 20.0, "rounds": 10.0} for n in range(8)}}
    few = judge(Claim("four conversations", "tau", ("a",), "above", 1.0), rows, turns)
    assert (few["prompts"], few["verdict"]) == (4, "undecided")


def test_a_key_is_of_what_was_chosen() -> None:
    """So it stays when there is a new option."""
    from papers.measuring import chosen

    assert chosen(SamplingConfig()) == {}
    method = MethodConfig(source="small_lm", stop=StopConfig(rule="beta", max_draft=3))
    assert chosen(method) == {"source": "small_lm", "stop": {"rule": "beta", "max_draft": 3}}


def test_what_was_not_measured_says_why() -> None:
    from dataclasses import replace

    from papers.claims import QUIET, Claim, judge

    rows, counts = rows_of("a", "b"), measured(a=MANY)
    timed = judge(Claim("fast", "speedup", ("a",), "above", 1.0), rows, counts)
    assert (timed["verdict"], timed["reason"]) == ("not run", QUIET)
    for each in list(counts["a"].values())[:2]:
        each.update(seconds=1.0, plain_seconds=3.0)
    some = judge(Claim("fast", "speedup", ("a",), "above", 1.0), rows, counts)
    assert (some["prompts"], some["values"], some["ci95"]) == (2, [3.0], [2.0, 2.0])  # those that were timed
    assert judge(Claim("more", "tau", ("a", "b")), rows, counts)["reason"] == "b: not measured yet"
    rows["b"] = replace(rows["b"], never="no such drafter")
    assert judge(Claim("more", "tau", ("a", "b")), rows, counts)["reason"] == "no such drafter"


# ------------------------------------------------------------------------------------------------------------- counting


def graph_of(tokens: list[int], parents: tuple[int, ...], rows: tuple[int, ...] = ()) -> GraphTree:
    return GraphTree(torch.tensor(tokens), parents, rows or (-1,) * len(parents), drafted=len(parents))


def test_trees_are_counted_by_hand() -> None:
    """Root → 0:a (1:b → 2:c), 3:b → 4:c; the target takes 3 and 4, the second child of the root and its only one."""
    from papers.watching import of_tree

    a, b, c = 5, 6, 7
    tree = graph_of([a, b, c, b, c], (-1, 0, 1, -1, 3))
    found = of_tree(tree, [3, 4])
    assert found["reached"] == 3
    assert (found["tried"], found["rank_1"], found["rank_2"]) == (2, 1, 1)
    assert (found["verified"], found["verified_apart"]) == (6, 1 + 3 + 2)
    assert (found["nodes"], found["repeated_1"], found["repeated_2"], found["repeated_3"]) == (5, 4, 4, 0)
    assert found["shared_rounds"] == 0
    merged = GraphTree(tree.tokens, tree.parents, tree.rows, drafted=5, merged={3: 1})
    assert of_tree(merged, [0, 1])["shared_rounds"] == 0  # up to the merged node, not through it
    assert of_tree(merged, [0, 1, 2])["shared_rounds"] == 1
    copied = GraphTree(tree.tokens, tree.parents, tree.rows, drafted=4, merged={3: 1})
    assert of_tree(copied, [3, 4])["shared_rounds"] == 1
    optimal = OptimalTree(torch.tensor([a, b, c]), (-1, -1, 0), (-1,) * 3, masses=(0.9, 0.3), steps=(0.55, 0.3, 0.95))
    found = of_tree(optimal, [0])
    assert (found["in_band_3"], found["right_3"], found["in_band_2"], found["right_2"]) == (1, 1, 1, 0)
    assert (found["in_band_5"], found["right_5"]) == (1, 0)
    assert found["expected_reached"] == pytest.approx(2.2 * 2)


def test_the_divergence_is_that_of_nodes_with_the_same_gram() -> None:
    """Three extended nodes with the token 6: two after 5 and one after the root, which is 9."""
    from papers.gsd import divergences

    tree = graph_of([5, 6, 5, 6, 6], (-1, 0, -1, 2, -1), (1, 2, 3, 4, 5))
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    logs = logits.log_softmax(-1)

    def kl(row: int, other: int) -> float:
        return float((logs[row].exp() * (logs[row] - logs[other])).sum())

    found = divergences(tree, 9, logits)
    assert (found["kl_count_0"], found["kl_count_1"], found["kl_count_2"], found["kl_count_3"]) == (4, 3, 2, 1)
    assert found["kl_0"] == pytest.approx(sum(kl(row, 1) for row in (2, 3, 4, 5)), rel=1e-4)
    assert found["kl_1"] == pytest.approx(kl(3, 1) + kl(4, 2) + kl(5, 2), rel=1e-4)
    assert found["kl_2"] == pytest.approx(kl(3, 1) + kl(4, 2), rel=1e-4)


@pytest.mark.parametrize("acceptance", [(0.5, 0.2, 0.1), (0.9, 0.05), (0.3, 0.3, 0.2)])
@pytest.mark.parametrize("depth", [2, 5])
def test_sequoias_tree_is_what_its_dynamic_programme_finds(acceptance: tuple[float, ...], depth: int) -> None:
    from papers.sequoia import best_shape

    def best(nodes: int, deep: int, rank: int = 0) -> float:
        """The largest sum over `nodes` nodes below one that is reached, its children from `rank` on."""
        if not nodes or not deep or rank == len(acceptance):
            return 0.0
        return max(
            acceptance[rank] * (1 + best(below - 1, deep - 1)) + best(nodes - below, deep, rank + 1) if below else 0.0
            for below in range(nodes + 1)
        )

    for nodes in (1, 4, 7):
        paths = best_shape(acceptance, nodes, depth).paths
        assert len(paths) == nodes if depth == 5 else len(paths) <= nodes
        reached = sum(math.prod(acceptance[rank] for rank in path) for path in paths)
        assert reached == pytest.approx(best(nodes, depth))


# ----------------------------------------------------------------------------------------------------------- the driver


@pytest.fixture
def paper(tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The command on the tiny models: the entry it writes."""
    import paper as script

    questions = [{"question": text, "answer": "7"} for text in ("to be or ", "not to be", "def add(", "once upon")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))

    def run(name: str, *options: str) -> dict[str, Any]:
        given = ["--target", str(tiny_models / TARGET), "--prompts", f"code={tmp_path}/prompts.jsonl", "--num-prompts",
                 "1", "--tokens", "5", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out.json"), "--label",
                 "tiny", "--device", "cpu", "--ignore-eos", *options]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["paper.py", name, *given])
        script.main()
        entry: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())["entries"]["tiny"]
        return entry

    return run


def drafters(models: Path) -> list[str]:
    return ["--small-lm", str(models / SMALL_LM), "--checkpoint", str(models / EARLY_EXIT)]


@pytest.mark.parametrize("name", ["eesd", "aded", "gsd", "opt_tree", "mcsd"])
def test_claims_are_about_rows_of_their_table(name: str, tmp_path: Path) -> None:
    from papers.claims import Row, quantity
    from papers.measuring import key_of

    given = SimpleNamespace(work=tmp_path, table=["a", "b"], code_table="c", frequent_table="d", transcripts=None,
                            checkpoint=None, ablation="e", skip=[2], exits=None, tables=None, target="t")  # fmt: skip
    tables = importlib.import_module(f"papers.{name}").tables(options=given, categories=["code", "chat"])
    assert sum(len(table.claims) for table in tables.values()) > 20
    ways = {(row.method, row.sampling, row.other) for table in tables.values() for row in table.rows if row.method}
    keys = {key_of(Row("", method, sampling, other=other)) for method, sampling, other in ways}
    assert len(keys) == len(ways)  # rows share counts where they decode alike, and nowhere else
    for table in tables.values():
        rows = {row.name for row in table.rows}
        for claim in table.claims:
            for row, _, other in (term.partition("@") for term in claim.terms):
                assert row in rows, claim
                assert quantity(other or claim.quantity).label
            assert len(claim.scale) in (0, len(claim.terms))
        assert all(quantity(shown).label for shown in table.quantities)
        assert table.rows or table.never


TIMES = {"drafting_ms", "speedup", "milliseconds", "verifying_ms", "others_ms", "tree_share"}
SOME = {"gsd": ["table_1", "figure_3"], "opt_tree": ["figure_6"], "mcsd": ["table_4"], "eesd": ["table_4", "table_5"]}


@pytest.mark.parametrize("name", SOME)
def test_every_row_is_measured_or_says_why_not(
    paper: Callable[..., Any], tiny_models: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Table by table, and nothing twice."""
    import papers.opt_tree

    monkeypatch.setattr(papers.opt_tree, "SIZES", (3, 6, 150, 500))  # of which claims name two
    monkeypatch.setattr(papers.opt_tree, "DEPTH", 3)
    options = [*drafters(tiny_models), *(["--skip", "2"] if name == "eesd" else [])]
    for key in SOME[name]:
        entry = paper(name, *options, "--tables", key)
    assert list(entry["tables"]) == SOME[name]
    for table in entry["tables"].values():
        for label, row in table["rows"].items():
            known = [value for key, value in row["here"].items() if key not in TIMES]
            assert row["never"] or any(value is not None for value in known), label
        assert all(claim["verdict"] in ("undecided", "not run") for claim in table["claims"])  # of one prompt
    before = (tmp_path / "work/counts.jsonl").read_text()
    assert paper(name, *options, "--tables", *SOME[name])["tables"] == entry["tables"]
    assert (tmp_path / "work/counts.jsonl").read_text() == before
    with pytest.raises(SystemExit):
        paper(name, *options, "--tokens", "6")
    assert "has counts of another --tokens; choose another --work" in capsys.readouterr().err


def test_times_are_taken_when_asked_for(paper: Callable[..., Any], tiny_models: Path) -> None:
    options = [*drafters(tiny_models), "--tables", "table_8"]
    assert paper("eesd", *options)["tables"]["table_8"]["rows"]["EESD, Beta-TS"]["here"]["milliseconds"] is None
    entry = paper("eesd", *options, "--timed", "1", "--num-prompts", "2")
    assert (entry["prompts"], entry["timed"]) == (2, 1)
    assert all(value > 0 for value in entry["tables"]["table_8"]["rows"]["EESD, Beta-TS"]["here"].values())
    later = paper("eesd", *drafters(tiny_models), "--tables", "tables_1_3", "--num-prompts", "2")
    assert (later["timed"], later["tables"]["table_8"]) == (1, entry["tables"]["table_8"])


def test_exits_of_every_shape_are_compared(
    paper: Callable[..., Any], tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each drafts for its own rows, and what a step costs is what its layers and the head weigh."""
    from draft_models.checkpoint import save_pretrained
    from draft_models.early_exit import EarlyExit, exit_layers
    from draft_models.target.open_target import open_target

    target = open_target(str(tiny_models / TARGET))
    for name, n, depth in (("a", 1, 1), ("b", 2, 1), ("c", 1, 2)):
        model = target.layers(exit_layers(target.config, n), dtype=torch.float32)
        exits = EarlyExit.from_model(model, n, own_head=True, depth=depth)
        save_pretrained(tmp_path / name, exits, target.fingerprint, {"steps": 7}, torch.float32)
    assert paper("eesd", "--tables", "figure_4")["tables"]["figure_4"]["never"].startswith("needs --exits")
    given = ["--exits", *(str(tmp_path / name) for name in "abc"), "--tables", "figure_4", "figure_5"]
    tables = paper("eesd", *given)["tables"]
    shown = {name: row["here"] for key in ("figure_4", "figure_5") for name, row in tables[key]["rows"].items()}
    assert list(shown) == ["N = 1", "N = 2", "1 exit layer", "2 exit layers"]
    assert tables["figure_4"]["rows"]["N = 1"]["here"] == shown["1 exit layer"]
    whole = target.layers(dtype=torch.float32)
    layer = sum(weight.numel() for weight in whole.model.layers[0].parameters())
    head = whole.lm_head.weight.numel()
    share = {name: here["step_share"] for name, here in shown.items()}
    assert share["N = 1"] == pytest.approx((2 * layer + head) / (4 * layer + head))
    assert share["N = 2"] == share["2 exit layers"] == pytest.approx((3 * layer + head) / (4 * layer + head))
    for here in shown.values():
        rounds = 1 + here["per_round"] * here["step_share"]
        assert here["gain_by_weights"] == pytest.approx(here["tau"] / rounds)
        assert here["trained_steps"] == 7


@pytest.mark.slow
@pytest.mark.thorough
def test_exits_are_trained_alike(paper: Callable[..., Any], tmp_path: Path) -> None:
    from tests.train.jobs import write_corpus

    data = write_corpus(tmp_path)
    told = ["seq_len=48", "fit.batch_rows=2", "decode_prompts=0", "fit.precision=fp32", "data=local",
            f"data.path={data.path[0]}", "data.layout=text", "data.heldout_fraction=0.2",
            f"data.cache_dir={data.cache_dir}", "frozen_dtype=float32"]  # fmt: skip
    given = ["--tables", "figure_4", "figure_5", "--first-layers", "2", "1", "--depths", "2", "--train-steps", "2"]
    tables = paper("eesd", *given, "--train", *told)["tables"]
    assert list(tables["figure_4"]["rows"]) == ["N = 1", "N = 2"]
    assert list(tables["figure_5"]["rows"]) == ["1 exit layer", "2 exit layers"]
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "work" / "exits").rglob("drafter.safetensors")}
    assert {file.parent.name for file in files} == {"first_2_exit_1", "first_1_exit_1", "first_2_exit_2"}
    for table in tables.values():
        assert all(row["here"]["trained_steps"] == 2 for row in table["rows"].values())
    assert paper("eesd", *given, "--train", *told)["tables"] == tables
    assert all(file.stat().st_mtime_ns == at for file, at in files.items())


@pytest.mark.slow
@pytest.mark.thorough
def test_a_session_knows_the_prompts_before_it(tiny_models: Path) -> None:
    """The first prompt is decoded as without one, its repetition by what it taught."""
    from papers.aded import EARLY, drafting, in_session
    from papers.claims import Row
    from papers.measuring import Asked, Bench, continued, counts_of

    from draft_models.ngrams.table import TrigramTable
    from draft_models.settings import TABLE

    table = TrigramTable.open(tiny_models / TABLE)
    text = tuple(random_prompt(60, 3))
    asked = [Asked("first", "c", text[:4], text[4:]), Asked("other", "c", (7, 8), (9, 10, 11)),
             Asked("again", "c", (5, *text[:4]), text[4:])]  # fmt: skip
    bench = Bench(None, {"ngrams": table}, 260, 64, session=tuple(asked))
    row = Row("kept", measure=in_session)
    alone = [counts_of(continued(bench, Row("a", drafting(EARLY)), one)) for one in asked]
    first, _, again = (in_session(bench, row, one) for one in asked)
    assert first == alone[0]
    assert again["rounds"] < alone[2]["rounds"] / 2
    assert in_session(bench, row, asked[2]) == again


def test_pairs_are_entries_of_one_table(
    paper: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OPT and Llama pairs, each a target and a small LM with its tokenizer."""
    import paper as script

    pairs = []
    for name in ("llama", "opt"):
        models = [save_target(tmp_path / f"{name}_{role}", name, seed=seed) for seed, role in enumerate("td")]
        pairs += ["--pair", f"{name}={models[0]},{models[1]}"]
    given = ["paper.py", "mcsd", *pairs, "--prompts", f"code={tmp_path}/prompts.jsonl", "--num-prompts", "1",
             "--tokens", "4", "--ignore-eos", "--device", "cpu", "--tables", "table_5", "--work",
             str(tmp_path / "pairs"), "--out", str(tmp_path / "pairs.json")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", given)
    script.main()
    entries = json.loads((tmp_path / "pairs.json").read_text())["entries"]
    assert list(entries) == ["llama", "opt"]
    for name, entry in entries.items():
        assert entry["models"]["target"] == f"{name}_t"
        assert all(
            0 <= row["here"]["alpha_1"] <= row["here"]["alpha_4"] for row in entry["tables"]["table_5"]["rows"].values()
        )
    assert "llama: α, k = 4 | opt: α, k = 1" in capsys.readouterr().out
    for wrong, said in (
        (["--pair", "a=t"], "pair='a=t': expected NAME=TARGET,DRAFTER"),
        (["--pair", "a=t,d", "--target", "t"], "expected without --target, which it names"),
        (["--pair", "a=t,d", "--pair", "a=u,e"], "a name of its own for every pair"),
    ):
        monkeypatch.setattr(sys, "argv", ["paper.py", "mcsd", *wrong])
        with pytest.raises(SystemExit):
            script.main()
        assert said in capsys.readouterr().err


def test_bad_input_is_named(paper: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--tables", "table_99"], "tables=['table_99']: expected some of table_1"),
        (["--transcripts", "a.jsonl"], "either --target or --transcripts"),
        (["--tokens", "1"], "tokens=1: expected at least 2"),
    ):
        with pytest.raises(SystemExit):
            paper("gsd", *options)
        assert said in capsys.readouterr().err


def test_one_solved_example_stands_before_every_prompt(tmp_path: Path) -> None:
    from papers.shots import with_example

    from data_prep.text.prompts import Prompt
    from outrider.errors import UserError

    file = tmp_path / "p.jsonl"
    rows = [{"question": "one?", "answer": "1"}, {"question": "two?", "answer": "2"}, {"question": "three?"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [Prompt("2", "q", ("two?",), True), Prompt("x", "q", ("go on",), False)]
    chat, text = with_example(prompts, str(file))
    assert chat.turns == ("one?", "1", "two?")
    assert text.turns == ("one?\n\n1\n\ngo on",)
    with pytest.raises(UserError, match="no file of records"):
        with_example(prompts, "python_stdlib")
    file.write_text(json.dumps({"question": "three?"}) + "\n")
    with pytest.raises(UserError, match="has an answer to show"):
        with_example(prompts, str(file))


def test_pages_show_every_figure_and_verdict() -> None:
    from fill_tables import fill_paper
    from papers.claims import Claim, Row, Table, judged
    from papers.writing import markdown, plot

    row = MethodConfig(source="prompt_lookup", stop=StopConfig(max_draft=3))
    rows = (
        Row("a", row, paper=("1.5",), x=1.0),
        Row("b", row, SamplingConfig(temperature=1.0), x=2.0),
        Row("c", never="no time"),
    )
    claims = (Claim("b beats a", "tau", ("a", "b")),)
    table = Table("Table 9: all", ("tau",), rows, claims, ("MAL",), plot="tau")
    facts = {"models": {"target": "t"}, "prompts": 6, "categories": ["x"], "tokens": 8, "dtype": "float32"}
    found = judged(table, measured(a=MANY, b=[x + 1 for x in MANY]))
    other = judged(
        Table("Table 9", ("tau",), (Row("d", row),), (Claim("d", "tau", ("d",), "above", 1.0),)), measured(d=MANY)
    )
    record = {"here": {**facts, "tables": {"table_9": found}}, "there": {**facts, "tables": {"table_9": other}}}
    text = markdown({"entries": record})
    for said in ("### Table 9: all", "| a | 1.5 | 2.03 | – |", "| b | – | 3.03 | – |", "| c | – | not run: no time |",
                 "| d | – | – | 2.03 |", "- b beats a: here **holds** (2.03 → 3.03)", "- d: there **holds** (2.03)",
                 "Claims: 1 holds"):  # fmt: skip
        assert said in text
    page = "before\n<!-- x tables: begin -->\nold\n<!-- x tables: end -->\n"
    filled = fill_paper(page, {"paper": "x", "entries": record})
    assert filled == f"before\n<!-- x tables: begin -->\n{text}<!-- x tables: end -->\n"
    with pytest.raises(ValueError, match="no place for y"):
        fill_paper(page, {"paper": "y", "entries": record})
    drawn = plot({"entries": record})
    assert drawn is not None
    places = drawn.axes[0].lines[0].get_xydata().tolist()
    assert places == [[1.0, pytest.approx(12.2 / 6)], [2.0, pytest.approx(18.2 / 6)]]

"""Recorded drafts say what a rule does when it decodes, and the bounds in hindsight are bounds."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from draft_models.calibration.head import CalibrationHead
from inference.acceptance import Chooser
from inference.auto.costs import Costs
from inference.auto.policy import Tuning
from inference.decode import Round, speculative
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import Shaped
from inference.evaluate.results import PromptResult
from inference.generation import Generation
from inference.method_settings import StopConfig
from inference.stopping.factory import make_rule
from inference.structures.factory import Chain
from outrider.errors import UserError
from outrider.streams import Streams
from tests.tiny import LAYERS, make_drafter, open_stack, random_prompt, save_target

CURVE = tuple(1.0 + 0.05 * width for width in range(65))
TUNING = Tuning(Costs((0.3,) * 65, CURVE, 0.1, 1.05))
STOPS = {
    "fixed": StopConfig(max_draft=3),
    "confidence": StopConfig(rule="confidence", threshold=0.5, max_draft=15),
    "adaedl": StopConfig(rule="adaedl", max_draft=15),
    "beta": StopConfig(rule="beta", max_draft=15),
    "auto": StopConfig(max_draft="auto"),
    "survival": StopConfig(rule="survival"),
    "survival, head": StopConfig(rule="survival", score="head"),
}


def test_a_recorded_text_has_the_rounds_of_decoding(tmp_path: Path) -> None:
    import recorded_drafts as recorded

    path = save_target(tmp_path, kv_heads=2, peak=6.0)
    stack, source = open_stack(path)[1], EarlyExitSource(make_drafter(path, LAYERS - 1, noise=0.3))
    head, prompt = CalibrationHead(64, 64).requires_grad_(False), random_prompt(20)
    head.draft += 0.05

    def rounds(drafter: Shaped, chooser: Chooser) -> Iterator[Round]:
        return speculative(stack, drafter, prompt, max_new_tokens=40, chooser=chooser)

    placeholder = make_rule(StopConfig(), Streams(0), default=8)
    drafts = recorded.record(rounds, Shaped(source, Chain(placeholder)), Chooser(), head)
    recorded.save_text(tmp_path / "text.json", recorded.Text("p", "c", drafts))
    text = recorded.read_text(tmp_path / "text.json")
    assert len(text.drafts) == 39
    seen = set()
    for name, stop in STOPS.items():
        own, said = (make_rule(stop, Streams(0), asked, TUNING, default=8) for asked in (head, recorded.said))
        decoded = list(rounds(Shaped(source, Chain(own)), Chooser()))[1:]
        spells = recorded.replay(said, text)
        assert [(s.drafted, s.accepted) for s in spells] == [(r.drafted, r.accepted) for r in decoded], name
        seen.add(tuple(s.drafted for s in spells))
    assert len(seen) > 4


def test_the_oracle_is_the_best_of_all_ways_through_a_text() -> None:
    from recorded_drafts import Draft, Text, oracle, seconds_of

    chance = random.Random(0)
    for _ in range(20):
        lengths = [min(3, 5 - position) for position in range(6)]
        drafts = [Draft(chance.randint(0, n), (-0.1,) * n, (0.1,) * n, (0.0,) * n) for n in lengths]
        costs = Costs((chance.uniform(0.05, 0.8),) * 65, CURVE, 0.1, 1.0)
        found = sum(seconds_of(spell.drafted, costs) for spell in oracle(Text("p", "c", tuple(drafts)), costs))
        best = float("inf")
        for ways in itertools.product(range(1, 4), repeat=6):
            position = spent = 0.0
            while position < 6:
                draft = drafts[int(position)]
                drafted = min(ways[int(position)], len(draft.log_q))
                spent += seconds_of(drafted, costs)
                position += min(drafted, draft.accepted) + 1
            best = min(best, spent)
        assert found == pytest.approx(best)


def test_rules_can_be_left_out_but_for_fixed_lengths() -> None:
    import compare_stopping

    stops = compare_stopping.rules_of(head=False)
    lengths = {name for name in stops if name.startswith("K = ")}
    assert compare_stopping.wanted_rules(stops, None) == stops
    assert set(compare_stopping.wanted_rules(stops, ["survival", "AdaEDL"])) == lengths | {"survival", "AdaEDL"}
    with pytest.raises(UserError, match=r"rules='SpecDec\+\+': expected some of: max-probability"):
        compare_stopping.wanted_rules(stops, ["survival", "SpecDec++"])  # which asks a head


def test_k_is_tuned_on_all_other_prompts() -> None:
    """Not on the prompt itself, nor on another turn of it."""
    import compare_stopping

    def result(prompt: str, turn: int, best: str) -> PromptResult:
        seconds = {name: 1.0 if name == best else 2.0 for name in ("K = 1", "K = 2", "K = 3")}
        rounds = {name: (Round((7,), 1, 0, 0, spent),) * 4 for name, spent in seconds.items()}
        generations = {
            name: Generation((7,) * 5, 0.1, sum(r.seconds for r in found), found) for name, found in rounds.items()
        }
        return PromptResult(prompt, "c", (1, 2), generations, "K = 1", conversation=prompt)

    results = [result("a", 0, "K = 1"), result("a", 1, "K = 1"), result("b", 0, "K = 2"), result("c", 0, "K = 2")]
    assert [k for _, k in compare_stopping.tuned_elsewhere(results)] == ["K = 2", "K = 2", "K = 1", "K = 1"]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_command_measures_and_records(tmp_path: Path, tiny_models: Path) -> None:
    import compare_stopping
    import fill_tables

    for name in ("a", "b"):
        lines = [json.dumps({"prompt": f"{name} {i}: the "}) + "\n" for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    given = [f"target={tiny_models / 'target'}", f"small_lm={tiny_models / 'small_lm'}", "max_new_tokens=8"]
    places = ["--prompts", f"a={tmp_path / 'a.jsonl'}", "--prompts", f"b={tmp_path / 'b.jsonl'}", "--work",
              str(tmp_path / "work"), "--out", str(tmp_path / "out.json")]  # fmt: skip
    compare_stopping.main([*given, *places, "--entry", "greedy"])
    head = f"eagle3={tiny_models / 'eagle3'}"
    compare_stopping.main([*given, head, "sampling.temperature=1", *places, "--entry", "sampled", "--recorded-only"])
    entries = json.loads((tmp_path / "out.json").read_text())["entries"]
    found = entries["greedy"]["sources"]["small_lm"]
    assert set(found["live"]["arms"]) - {"autoregressive"} == set(found["recorded"]["rules"]) - {"oracle"}
    for name, arm in found["live"]["arms"].items():
        assert arm["identical"] == arm["prompts"] == 4, name
    rules = found["recorded"]["rules"]
    assert all(rule["rate"] <= rules["oracle"]["rate"] * (1 + 1e-9) for rule in rules.values())
    assert max(rules[f"K = {k}"]["over_hindsight"]["a"] for k in (1, 2, 15)) <= 1
    sampled = entries["sampled"]["sources"]
    assert all("live" not in source and "survival, head" in source["recorded"]["rules"] for source in sampled.values())
    assert sampled.keys() == {"small_lm", "eagle3"}
    page = "<!-- greedy stopping: begin -->\n<!-- greedy stopping: end -->\n"
    assert "| survival |" in fill_tables.fill_record(page, {"greedy": entries["greedy"]})
    assert (tmp_path / "out.png").stat().st_size > 0
    few = ["--rules", "survival", "--recorded", "0", "--entry", "few"]
    compare_stopping.main([*given, *places, *few, "--out", str(tmp_path / "few.json")])
    (entry,) = json.loads((tmp_path / "few.json").read_text())["entries"].values()
    assert "recorded" not in entry["sources"]["small_lm"]
    table = compare_stopping.stopping(entry)
    assert "4 prompts decoded.\n" in table
    assert table.count("\n| K = ") == 9
    assert table.count("\n| survival |") == 1
    with pytest.raises(SystemExit):
        compare_stopping.main([*given, *places, *few, "--recorded-only"])

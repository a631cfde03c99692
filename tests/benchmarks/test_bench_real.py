"""The record: every arm on every prompt, kept prompt by prompt, one entry a dtype."""

import copy
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure.lossless import Deviation
from outrider.inference.measure.results import PromptResult
from tests.tiny import save_exit, save_target


def models(folder: Path) -> list[str]:
    """A target with two drafters in `folder`; the options that name them."""
    path = save_target(folder / "target", eos_token_id=257)
    save_target(folder / "small", seed=1)
    save_exit(folder / "eesd", path, 2, noise=0.1)
    return [f"target={path}", f"checkpoint={folder / 'eesd'}", f"small_lm={folder / 'small'}"]


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for one in sorted(folder.glob("results-*")) for line in one.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_record_has_every_arm_and_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_real
    from fill_tables import differences, filled_page
    from record_raw import raw_file, read_raw

    options = models(tmp_path)
    for name in ("one", "two"):
        lines = [json.dumps({"prompt": f"{name} {i}: "}) + "\n" for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        options += ["--prompts", f"{name}={tmp_path / name}.jsonl"]
    work = tmp_path / "work"

    def record(*more: str) -> dict[str, Any]:
        given = ["dtype=float32", "method=[eesd_fixed,vanilla,prompt_lookup]", "max_new_tokens=12", *options]
        monkeypatch.setattr(sys, "argv", ["bench_real.py", *given, "--work", str(work), *more])
        bench_real.main()
        found: dict[str, Any] = json.loads((work / "record.json").read_text())["entries"]["float32"]
        return found

    entry = record()
    before = kept(work / "float32")
    assert [line["turns"][0]["prompt_id"] for line in before] == ["one/1", "one/2", "two/1", "two/2"]
    assert record()["arms"].keys() == entry["arms"].keys()
    assert kept(work / "float32") == before
    raw = read_raw(raw_file(work / "record.json"))
    assert differences({"record": {"entries": {"float32": entry}}}, {"record": raw}) == []
    with monkeypatch.context() as patched:
        patched.setattr(bench_real, "evaluate_checkpoint", lambda *_, **__: pytest.fail("nothing is measured again"))
        record("--again", "--out", str(tmp_path / "again.json"), "--label", "x")
    assert json.loads((tmp_path / "again.json").read_text())["entries"] == {"float32_x": entry}
    assert set(entry["arms"]) == {
        "autoregressive", "transformers_generate", "eesd_fixed", "vanilla", "prompt_lookup",
    }  # fmt: skip
    for name, arm in entry["arms"].items():
        assert arm["identical"] == entry["prompts"] == 4, name
        assert sum(part["tokens"] for part in arm["by_category"].values()) == arm["tokens"]
        low, high = arm["speedup"]["ci95"]
        assert low <= arm["speedup"]["median"] <= high
    assert entry["arms"]["eesd_fixed"]["tau"] > 1
    page = "a\n<!-- float32 table: begin -->\nold\n<!-- float32 table: end -->\nb\n"
    known = {"record": {"entries": {"float32": entry}}}
    filled = filled_page(page, known)
    assert filled == filled_page(filled, known)
    assert "old" not in filled
    assert all(f"\n| {name} | 4/4 | " in filled for name in entry["arms"])


def results() -> list[PromptResult]:
    """Of 12 prompts in two categories, two of them turns of one conversation; the texts of one arm may differ."""
    draw, found = random.Random(0), []
    for place in range(12):
        text = tuple(draw.choices(range(99), k=8))
        other, arms = text if place % 3 else (*text[:7], 99), dict[str, Generation]()
        for arm, step, said in (("autoregressive", 1, text), ("vanilla", 3, text), ("other", 2, other)):
            rounds = (Round(said[at : at + step], step, min(step, 8 - at) - 1, 3, 0.1) for at in range(1, 8, step))
            arms[arm] = Generation(said, draw.random(), draw.random(), tuple(rounds))
        judged = {"vanilla": Deviation(8, (draw.random(), 0.1), draw.random(), 1, 3)} if place % 2 else {}
        found.append(PromptResult(f"p{place}", "ab"[place % 2], tuple(range(place + 1)), arms, "autoregressive",
                                  deviations=judged, conversation="both" if place in (3, 5) else None))  # fmt: skip
    return found


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "identical": lambda entry, _: entry["arms"]["other"].update(identical=9),
    "tau": lambda entry, _: entry["arms"]["other"]["by_category"]["a"].update(tau=1.5),
    "the end of an interval": lambda entry, _: entry["arms"]["vanilla"]["end_to_end"]["ci95"].__setitem__(0, 0.1),
    "a second of decoding": lambda _, raw: raw["prompts"][5]["arms"]["vanilla"].update(decode_seconds=0.5),
    "a second of prefill": lambda _, raw: raw["prompts"][0]["arms"]["other"].update(prefill_seconds=0.5),
    "a text": lambda _, raw: raw["prompts"][1]["arms"]["other"].update(text="0" * 12),
    "a drafted token": lambda _, raw: raw["prompts"][2]["arms"]["vanilla"]["rounds"][0].__setitem__(1, 9),
}


def test_raw_data_make_the_figures_of_the_results(tmp_path: Path) -> None:
    """Turns of a conversation are one unit. One changed figure or second is found, and an entry that is gone."""
    from fill_tables import differences
    from record_raw import entry_of, figures_of_arms, packed, read_raw, write_raw

    data: Any = {"conditions": {"seed": 3, "made_with": "x"}, "prompts": [packed(one) for one in results()]}
    for file in (tmp_path / "one", tmp_path / "two"):
        for name in ("e", "f", "e"):
            write_raw(file, name, data)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    raw, entry, arms = read_raw(tmp_path / "one"), entry_of(data), figures_of_arms(results(), 3)
    assert entry == {**data["conditions"], "prompts": 12, "prompt_tokens": 78, "arms": arms}
    assert (arms["other"]["identical"], arms["other"]["speedup"]["prompts"]) == (8, 11)
    fastest = max(arms, key=lambda arm: float(arms[arm]["tokens_per_second"]))
    assert [name for name, arm in arms.items() if arm["over_fastest"]["ci95"] == [1.0, 1.0]] == [fastest]
    record = json.loads(json.dumps({"entries": {"e": entry, "f": entry}}))
    assert differences({"r": record}, {"r": raw}) == []
    assert differences({"r": record}, {"r": {"e": raw["e"]}}) == ["r.json: f is not what its data say"]
    assert len(differences({"r": {"entries": {}}}, {"r": raw})) == 2
    for changed, change in CHANGES.items():
        other, own = copy.deepcopy(record), copy.deepcopy(raw)
        change(other["entries"]["e"], own["e"])
        assert differences({"r": other}, {"r": own}) == ["r.json: e is not what its data say"], changed

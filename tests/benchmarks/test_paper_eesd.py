"""EESD's tables on tiny models: every row is run or says why not, claims are judged as they should be."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_models.settings import EARLY_EXIT, SMALL_LM, TARGET
from inference.decode import autoregressive
from inference.drafters.skip_layers import SkipLayersSource
from inference.evaluate_checkpoint import main as evaluate_checkpoint
from inference.session import TargetSession
from inference.tree import ROOT
from tests.tiny import open_stack, random_prompt, save_target


@pytest.fixture
def tables(tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Any, str]]:
    """The command, its evaluations in this process: how many those were, eesd_tables.json and eesd_tables.md."""
    import paper_eesd

    questions = [{"prompt": text} for text in ("to be or ", "not to be", "def add(", "once upon", "class A:", "1 2 3")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))

    def run(*options: str) -> tuple[int, Any, str]:
        runs: list[list[str]] = []

        def in_process(line: list[str], check: bool) -> None:
            runs.append(line)
            monkeypatch.setattr(sys, "argv", [*line[1:], "threads=1", "device=cpu"])
            evaluate_checkpoint()

        monkeypatch.setattr("commands.subprocess", SimpleNamespace(run=in_process))
        given = ["--target", str(tiny_models / TARGET), "--checkpoint", str(tiny_models / EARLY_EXIT),
                 "--prompts", str(tmp_path / "prompts.jsonl"), "--num-prompts", "2", "--tokens", "4",
                 "--skip-tokens", "6", "--lengths", "2", "--out", str(tmp_path / "out"), *options]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["paper_eesd.py", *given])
        monkeypatch.setattr(paper_eesd, "DRAWS", 50)
        paper_eesd.main()
        out = tmp_path / "out"
        assert (out / "eesd_fig3.png").stat().st_size > 0
        return len(runs), json.loads((out / "eesd_tables.json").read_text()), (out / "eesd_tables.md").read_text()

    return run


def test_every_row_is_measured_and_nothing_twice(
    tables: Callable[..., Any], tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("no_layer", "open_data"):
        shutil.copytree(tiny_models / EARLY_EXIT, tmp_path / "ablation" / name)
    options = ["--small-lm", str(tiny_models / SMALL_LM), "--ablation", str(tmp_path / "ablation")]
    runs, found, text = tables(*options)
    assert runs == 3
    reports = found["reports"]
    skip = json.loads((tmp_path / "out/skip.json").read_text())
    assert skip["own_prompts"]
    for method in ("skip_fixed", "skip_beta"):
        assert reports[method]["settings"]["skip"] == skip["skip"]
    lengths = {name: report["settings"]["stop"]["max_draft"] for name, report in reports.items() if "tree" not in name}
    assert lengths.pop("eesd_k2") == 2
    assert set(lengths.values()) == {10}
    assert {name.partition("/")[2] for name in reports if "/" in name} == {"eesd_beta"}
    assert "2/2" in text
    assert "not measured" not in text
    assert text.count("not run") == text.count("belongs to an early exit") == 2
    assert all("speedup" in claim for claims in found["claims"].values() for claim in claims)
    assert sum("hm" in claim for claim in found["claims"]["table_4"]) == 6
    assert tables(*options) == (0, found, text)
    with pytest.raises(SystemExit):
        tables(*options, "--lengths", "3")
    assert "has results of another --lengths; choose another --out" in capsys.readouterr().err


def test_what_cannot_run_says_why(tables: Callable[..., Any], tiny_models: Path, tmp_path: Path) -> None:
    import paper_eesd
    from paper_eesd_tables import EXITS_ONLY

    headless = tmp_path / "headless"
    shutil.copytree(tiny_models / EARLY_EXIT, headless, ignore=shutil.ignore_patterns("calibration*"))
    runs, found, text = tables("--checkpoint", str(headless), "--skip", "2")
    assert runs == 1
    assert not (tmp_path / "out/skip.json").exists()
    assert found["reports"]["skip_beta"]["settings"]["skip"] == [2]
    for reason in (paper_eesd.NO_HEAD, paper_eesd.NO_SMALL_LM, paper_eesd.NO_ABLATION, EXITS_ONLY):
        assert f"not run: {reason}" in text
    assert text.count("not run") == 13
    assert "- `eesd_cali` over `eesd_beta`: not measured" in text
    assert "- `eesd_beta` over `eesd_fixed`: by the ratio of speed-ups **" in text


def report(speedups: list[float], counts: tuple[int, int, int] = (10, 5, 8)) -> dict[str, Any]:
    names = [f"{place // 2}/turn{place % 2}" for place in range(len(speedups))]
    return {"speedup_per_prompt": dict(zip(names, speedups, strict=True)), "counts": dict.fromkeys(names, counts)}


def test_claims_by_hand() -> None:
    import paper_eesd

    slow, fast = report([1.0, 1.2] * 6), report([2.0, 2.4] * 6, (10, 6, 8))
    found = paper_eesd.compare(fast, slow, hm=True)
    assert found["speedup"] == {"value": 2.0, "ci95": [2.0, 2.0], "verdict": paper_eesd.HOLDS}
    assert found["hm"]["value"] == pytest.approx(100 * (6 / 9 - 5 / 9))
    assert found["hm"]["verdict"] == paper_eesd.HOLDS
    for other, verdict in ((slow, paper_eesd.UNDECIDED), (fast, paper_eesd.FAILS)):
        against = paper_eesd.compare(slow, other, hm=True)
        assert {against["speedup"]["verdict"], against["hm"]["verdict"]} == {verdict}
    few = paper_eesd.compare(report([2.0] * 8), report([1.0] * 8), hm=False)  # four conversations, of two turns each
    assert (few["speedup"]["value"], few["speedup"]["verdict"]) == (2.0, paper_eesd.UNDECIDED)
    v, r = 5 / 10, 5 / 8
    assert paper_eesd.harmonic_mean([(10, 5, 8)] * 3) == pytest.approx(2 * v * r / (v + r))


def test_the_layers_to_skip_are_those_whose_absence_shows_least(tmp_path: Path) -> None:
    """Counted as a draft would begin, place by place; two layers that change nothing are chosen."""
    from choose_skip import Answer, choose, tokens_per_cost

    _, stack = open_stack(save_target(tmp_path, "mistral", kv_heads=2, peak=6.0))
    prompt = random_prompt(12)
    answer = [token for r in autoregressive(stack, prompt, max_new_tokens=20) for token in r.tokens]
    measured = Answer(stack, prompt, answer)
    for skip in ([1], [0, 3]):
        session, source, right, text = TargetSession(stack, 0, 64), SkipLayersSource(skip), 0, [*prompt, *answer]
        with torch.inference_mode():
            session.prefill(text[:11])
            source.begin(session)
            session.commit(range(11))
            for place, token in enumerate(text[11:-1], start=11):
                right += int(source.extend(torch.tensor([token]), (ROOT,))[0].argmax()) == text[place + 1]
                session.finish()
                session.commit([0])
        assert measured.right_without(skip) == right
    for layer in (stack.layers[1], stack.layers[2]):
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    answer = [token for r in autoregressive(stack, prompt, max_new_tokens=20) for token in r.tokens]
    found = choose(stack, [Answer(stack, prompt, answer)])
    assert found["skip"] == [1, 2]
    assert found["best"]["right"] == 1.0
    assert tokens_per_cost(1.0, 0.5) == (pytest.approx(11 / 6), 10)
    assert tokens_per_cost(0.0, 0.5) == (pytest.approx(1 / 1.5), 1)

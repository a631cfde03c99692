"""A serving engine measured beside this runtime: what is made of what it says, and of what it gets wrong."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.core.generation import Generation
from inference.core.stopwatch import Round
from inference.evaluate.command import evaluate as run_command
from inference.evaluate.served import FILE
from inference.measure.prompt_results import read_results
from inference.measure.results import AUTOREGRESSIVE, PromptResult
from inference.measure.statistics import acceptance_by_position
from inference.report.served import DRAFTED, PLAIN, schedule, served_lines, served_row
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS
from inference.settings.method import MethodConfig, NgramConfig, StopConfig
from inference.settings.serving import DRAFTS, draft_length, why_not, with_lengths
from outrider.errors import UserError
from outrider.streams import Streams
from tests.inference.evaluate.evaluating import METHODS, QUESTIONS, evaluate
from tests.inference.serving import engine_stand_in

pytestmark = pytest.mark.usefixtures("on_the_cpu")
MakeConfig = Callable[..., EvaluateConfig]


def stand_in(folder: Path, measured: EvaluateConfig, **plan: Any) -> Path:
    """A Python that answers what `measured` found, with its own drafts' acceptance unless `plan` says otherwise."""
    results = [one.turns[0] for one in read_results(Path(measured.out_dir)).values()]
    said = {json.dumps(list(r.prompt)): r.generations for r in results}
    plan = {
        "texts": {prompt: made[AUTOREGRESSIVE].tokens for prompt, made in said.items()},
        "accepted": {prompt: [r.accepted for r in made["chain"].rounds] for prompt, made in said.items()},
        "log": str(folder / "log"),
    } | plan
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\n{Path(engine_stand_in.__file__).read_text()}")
    python.chmod(0o755)
    python.with_name("python.json").write_text(json.dumps(plan))
    return python


def served(config: EvaluateConfig, python: Path, **changes: Any) -> EvaluateConfig:
    return replace(config, engine="transformers", engine_python=str(python), resume=True, **changes)


def report(config: EvaluateConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(config.out_dir) / "report.json").read_text())["reports"][0]
    return found


@pytest.mark.slow
def test_of_an_engine_that_does_as_we_do(config: MakeConfig, tmp_path: Path) -> None:
    """The same acceptance at every depth; and what was measured is not measured again."""
    made = config("out")
    evaluate(made)
    evaluate(served(made, stand_in(tmp_path, made)))
    found = report(made)
    (row,), ours = found["served"], [r.turns[0].generations["chain"] for r in read_results(Path(made.out_dir)).values()]
    assert (row["draft_tokens"], row["requests"], row["engine"]) == (3, len(QUESTIONS), "stand-in 1")
    assert row["identical_to_plain"] == row["plain_identical_to_reference"] == len(QUESTIONS)
    assert row["tau"] == row["tau_here"]
    whole = [replace(g, rounds=g.rounds[:-1]) for g in ours]
    shares = [one["accepted"] for one in acceptance_by_position(whole)]
    assert [one["served"] for one in row["acceptance"]] == [one["here"] for one in row["acceptance"]]
    assert [one["here"] for one in row["acceptance"]][: len(shares)] == pytest.approx(shares)
    assert not any(one["differs"] for one in row["acceptance"])
    assert "served_judgement" not in found
    tree = json.loads((Path(made.out_dir) / "report.json").read_text())["reports"][1]
    assert "served" not in tree  # no engine drafts trees
    before = (tmp_path / "log").read_text()
    assert "stand-in 1" in (Path(made.out_dir) / "report.md").read_text()
    evaluate(served(made, stand_in(tmp_path, made, dies=0)))  # it is not started
    assert (tmp_path / "log").read_text() == before


@pytest.mark.slow
def test_a_token_that_is_not_the_targets_is_a_fault(config: MakeConfig, tmp_path: Path) -> None:
    made = config("out", methods={"chain": METHODS["chain"]})
    evaluate(made)
    texts = [one.turns[0].generations[AUTOREGRESSIVE].tokens for one in read_results(Path(made.out_dir)).values()]
    other = next(token for token in range(5, 200) if token not in {text[4] for text in texts})
    with pytest.raises(SystemExit):
        evaluate(served(made, stand_in(tmp_path, made, changed=[4, other])))
    found = json.loads((Path(made.out_dir) / "report.json").read_text())
    assert found["served"][0]["identical_to_plain"] == 0
    assert found["served_judgement"]["drafted"]["faults"]
    assert "plain" not in found["served_judgement"]
    assert "faults" in "".join(served_lines([found]))


@pytest.mark.slow
def test_an_engine_that_dies_says_why_and_loses_nothing(config: MakeConfig, tmp_path: Path) -> None:
    made = config("out", methods={"chain": METHODS["chain"]})
    evaluate(made)
    with pytest.raises(UserError, match=r"it ended, see .*chain.log; its last words: no memory is left"):
        evaluate(served(made, stand_in(tmp_path, made, dies=3)))  # the first is the warm-up
    assert len((Path(made.out_dir) / FILE).read_text().splitlines()) == 2
    (tmp_path / "log").unlink()
    evaluate(served(made, stand_in(tmp_path, made)))
    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sum(one["drafts"] and one["max_new_tokens"] == made.max_new_tokens for one in asked) == len(QUESTIONS) - 2


@pytest.mark.slow
def test_the_worker_runs_transformers(config: MakeConfig, models: Path, tmp_path: Path) -> None:
    """The engine that is there everywhere: the drafter as exported accepts what it accepts here, in every length."""
    made = config("out", methods={"chain": METHODS["chain"], "lookup": MethodConfig("prompt_lookup")})
    texts = [prompt.turns[0] for prompt in QUESTIONS[:2]]
    run_command(
        replace(made, engine="transformers", draft_tokens=(1, 2), prompt_text=texts, template="none",
                target=str(models / "target"))
    )  # fmt: skip
    reports = json.loads((Path(made.out_dir) / "report.json").read_text())["reports"]
    assert [r["method"] for r in reports] == ["chain_k1", "chain_k2", "lookup_k1", "lookup_k2"]
    for found in reports:
        (row,) = found["served"]
        assert row["identical_to_plain"] == row["plain_identical_to_reference"] == 2
        if found["method"].startswith("chain"):
            assert row["rounds"] > 0
            assert [one["served"] for one in row["acceptance"]] == [one["here"] for one in row["acceptance"]]


def test_an_acceptance_that_differs_is_named() -> None:
    """By the depth from which it does."""

    def text(accepted: int) -> Generation:
        return Generation((0,), 0.1, 1.0, (Round((1,) * (accepted + 1), 2, accepted, 2, 0.1),) * 6)

    def row(there: Callable[[int], int]) -> dict[str, Any]:
        results = [
            PromptResult(str(place), "", (0,), {AUTOREGRESSIVE: text(0), "m": text(there(place))}, AUTOREGRESSIVE)
            for place in range(8)
        ]
        here = [text(place % 2) for place in range(8)]
        seconds = {PLAIN: 1.0, DRAFTED: 1.0}
        return served_row("m", 2, results, here, None, seconds, Streams(0))

    assert [one["differs"] for one in row(lambda place: place % 2)["acceptance"]] == [False, False]
    assert [one["differs"] for one in row(lambda place: 1)["acceptance"]] == [True, False]
    assert [one["differs"] for one in row(lambda place: 2 * (place % 2))["acceptance"]] == [False, True]
    odd = row(lambda place: 1) | {"engine": "e", "concurrency": 1}
    said = served_lines([{"method": "m", "settings": {"source": "early_exit"}, "served": [odd], "temperature": 0}])
    assert "at depth 1" in "".join(said)


def test_the_draft_length_that_pays() -> None:
    def row(requests: int, k: int, median: float, verdict: str = "faster") -> dict[str, Any]:
        return {"concurrency": requests, "draft_tokens": k, "speedup": {"median": median}, "verdict": verdict}

    rows = [row(1, 2, 1.5), row(1, 4, 1.8), row(4, 2, 1.2), row(4, 4, 1.3, "undecided"), row(8, 2, 0.9, "slower")]
    assert schedule(rows) == [(1, 1, 4), (2, 4, 2), (5, 8, 0)]


def test_what_an_engine_cannot_run_is_said() -> None:
    chain, tree = METHODS["chain"], METHODS["tree"]
    assert why_not("vllm", chain) is None
    for method, reason in (
        (tree, "chains of fixed length"),
        (replace(chain, stop=StopConfig(rule="confidence")), "chains of fixed length"),
        (replace(chain, stop=StopConfig(max_draft="auto")), "draft_tokens"),
        (MethodConfig("skip_layers"), "skip_layers"),
        (MethodConfig("ngrams"), "mixed"),
        (MethodConfig("small_lm", verify="naive"), "exactly"),
    ):
        assert reason in str(why_not("vllm", method))
    assert {name for name, kind in KINDS.items() if kind.served not in DRAFTS["openvino"]} >= {"eagle3", "ngrams"}
    methods = {"chain": chain, "tree": tree, "ngrams": MethodConfig("ngrams", ngrams=NgramConfig(evidence="mixed"))}
    many = with_lengths("vllm", methods, (1, 5))
    assert {name: draft_length(one) for name, one in many.items() if name != "tree"} == {
        "chain_k1": 1, "chain_k5": 5, "ngrams_k1": 1, "ngrams_k5": 5,
    }  # fmt: skip
    assert many["tree"] == tree


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"draft_tokens": (3,)}, "draft_tokens"),
        ({"concurrency": (4,)}, "concurrency"),
        ({"engine": "openvino", "concurrency": (4,)}, "concurrency"),
        ({"engine": "vllm", "methods": {"tree": METHODS["tree"]}}, "chains of fixed length"),
        ({"engine": "vllm", "dtype": "int8"}, "dtype"),
        ({"engine": "vllm", "stop_strings": ["a"]}, "stop_strings"),
    ],
)
def test_options_of_engines_act_or_are_refused(changes: dict[str, Any], named: str, config: MakeConfig) -> None:
    with pytest.raises(UserError, match=named):
        config("out", **changes)

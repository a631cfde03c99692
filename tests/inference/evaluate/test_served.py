"""A serving engine measured beside this runtime: what is made of what it says, and of what it gets wrong."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoTokenizer

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.draft_models.targets.open_target import load_config, open_target
from outrider.draft_models.targets.settings import SMALL_LM, TABLE, TARGET, ReadingChanges
from outrider.inference.audit.answers import read_answers
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.drafters.early_exit.drafter import EarlyExitPlugin
from outrider.inference.evaluate import engine_blocks
from outrider.inference.evaluate.engine import measure_engine
from outrider.inference.evaluate.engine_blocks import FILE, FOLDER, block_keys, require_served
from outrider.inference.measure.results import PromptResult, read_results
from outrider.inference.measure.statistics import MedianInterval, acceptance_by_position
from outrider.inference.measure.threads import MachineLoad
from outrider.inference.report.served import EngineRun, choose_lengths, schedule_lines, served_lines, served_row
from outrider.inference.report.types import (
    DRAFTED,
    NOT_LOSSLESS,
    PLAIN,
    DepthShare,
    MethodReport,
    ServedRow,
    reports_in,
)
from outrider.inference.serving.proposer import NgramProposer
from outrider.inference.settings.engine import DRAFTS, EngineConfig, draft_length, refusal_of, with_lengths
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import AUTOREGRESSIVE, MethodConfig, NgramConfig, StopConfig
from outrider.inference.settings.sampling import SamplingConfig
from tests.inference.evaluate.evaluating import METHODS, QUESTIONS, evaluate, in_engine, measured
from tests.inference.evaluate.reports import report_of
from tests.inference.serving import engine_stand_in
from tests.refusals import refusal
from tests.tiny import byte_tokenizer, save_exit

pytestmark = pytest.mark.usefixtures("on_the_cpu")
MakeConfig = Callable[..., EvaluateConfig]


def stand_in(folder: Path, made: EvaluateConfig, **plan: Any) -> Path:
    """A Python that answers what `made` measured, with its own drafts' acceptance unless `plan` says otherwise."""
    said, first = measured(made), next(iter(made.methods))
    plan = {
        "texts": {prompt: arms[AUTOREGRESSIVE].tokens for prompt, arms in said.items()},
        "accepted": {prompt: [r.accepted for r in arms[first].rounds] for prompt, arms in said.items()},
        "log": str(folder / "log"),
    } | plan
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\n{Path(engine_stand_in.__file__).read_text()}")
    python.chmod(0o755)
    python.with_name("python.json").write_text(json.dumps(plan))
    return python


def served(config: EvaluateConfig, python: Path, **changes: Any) -> EngineConfig:
    return in_engine(config, **{"engine": "transformers", "engine_python": str(python), "resume": True, **changes})


def report(config: EvaluateConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(config.out_dir) / "report.json").read_text())
    return dict(found.get("reports", [found])[0])


@pytest.mark.slow
def test_of_an_engine_that_does_as_we_do(config: MakeConfig, tmp_path: Path) -> None:
    """The same acceptance at every depth; and what was measured is not measured again."""
    made = config("out")
    evaluate(made)
    with patch("os.getloadavg", return_value=(0.1,)):
        evaluate(served(made, stand_in(tmp_path, made), engine="vllm", concurrency=(1, 4)))
    found = report(made)
    (row, many), results = found["served"], read_results(Path(made.out_dir)).values()
    ours = [result.turns[0].generations["chain"] for result in results]
    assert {key for key in row if row[key] != many[key]} <= {"concurrency", "tokens_per_second", "acceptance"}
    assert [one["served"] for one in many["acceptance"]] == [one["served"] for one in row["acceptance"]]
    assert (row["draft_tokens"], row["requests"], row["engine"]) == (3, len(QUESTIONS), "stand-in 1")
    assert row["identical_to_plain"] == row["plain_identical_to_reference"] == len(QUESTIONS)
    assert row["tau"] == row["tau_here"]
    whole = [replace(g, rounds=g.rounds[:-1]) for g in ours]
    shares = [depth.accepted for depth in acceptance_by_position(whole)]
    assert [one["served"] for one in row["acceptance"]] == [one["here"] for one in row["acceptance"]]
    assert [one["here"] for one in row["acceptance"]][: len(shares)] == pytest.approx(shares)
    assert not any(one["differs"] for one in row["acceptance"])
    assert "served_judgement" not in found
    tree = json.loads((Path(made.out_dir) / "report.json").read_text())["reports"][1]
    assert "served" not in tree  # no engine drafts trees
    alone = {PLAIN: made.max_new_tokens, DRAFTED: 2 * made.max_new_tokens}
    assert row["tokens_per_second"] == alone
    assert many["tokens_per_second"] == {arm: len(QUESTIONS) * speed for arm, speed in alone.items()}  # in one block
    assert row["verdict"] == "faster"
    assert "<h2>In stand-in 1</h2>" in (Path(made.out_dir) / "report.html").read_text()
    before = (tmp_path / "log").read_text()
    assert "stand-in 1" in (Path(made.out_dir) / "report.md").read_text()
    evaluate(served(made, stand_in(tmp_path, made, dies=0), engine="vllm", concurrency=(4, 1)))  # it is not started
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
    assert found["served"][0]["verdict"] == NOT_LOSSLESS
    assert found["served_judgement"]["drafted"]["faults"]
    assert "plain" not in found["served_judgement"]
    assert "faults" in "".join(served_lines(reports_in(found)))


@pytest.mark.slow
def test_a_drafter_of_a_run_that_measured_nothing_is_exported_anew(config: MakeConfig, tmp_path: Path) -> None:
    made = config("out", methods={"chain": METHODS["chain"]})
    evaluate(made)
    python = stand_in(tmp_path, made)
    shutil.rmtree(made.out_dir)
    stale = Path(made.out_dir) / FOLDER / "early_exit"
    stale.mkdir(parents=True)
    (stale / "stale").touch()
    evaluate(served(made, python))
    assert (stale / "model.safetensors").exists()
    assert not (stale / "stale").exists()


def stopped(plugin: Any, where: str, target: Any, dtype: Any, folder: Path) -> None:
    """An export that was stopped on its way."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    raise KeyboardInterrupt


@pytest.mark.slow
def test_an_engine_that_dies_says_why_and_loses_nothing(config: MakeConfig, tmp_path: Path) -> None:
    made = config("out", methods={"chain": METHODS["chain"]})
    evaluate(made)
    with patch.object(EarlyExitPlugin, "export", stopped), pytest.raises(KeyboardInterrupt):
        evaluate(served(made, stand_in(tmp_path, made)))
    with pytest.raises(UserError, match=r"it ended, see .*chain.log; its last words: no memory is left"):
        evaluate(served(made, stand_in(tmp_path, made, dies=3)))  # the first is the warm-up
    assert len((Path(made.out_dir) / FILE).read_text().splitlines()) == 2
    (tmp_path / "log").unlink()
    assert (Path(made.out_dir) / FOLDER / "early_exit" / "model.safetensors").exists()
    evaluate(served(made, stand_in(tmp_path, made)))
    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sum(one["drafts"] and one["max_new_tokens"] == made.max_new_tokens for one in asked) == len(QUESTIONS) - 2


@pytest.mark.slow
def test_the_worker_runs_transformers(config: MakeConfig, models: Path, tmp_path: Path) -> None:
    """The engine that is there everywhere: the drafter as exported accepts what it accepts here, in every length."""
    made = config("out", methods={"chain": METHODS["chain"], "lookup": MethodConfig("prompt_lookup")})
    texts = [prompt.turns[0] for prompt in QUESTIONS[:2]]
    measure_engine(
        in_engine(made, engine="transformers", draft_tokens=(1, 2), prompt_text=texts, template="none",
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


@pytest.mark.slow
def test_an_engine_chooses_tokens_as_the_run_does(config: MakeConfig, tmp_path: Path) -> None:
    """And draws each answer by a seed of its own; all of these are audited, and the file of them can be again."""
    sampling = SamplingConfig(temperature=1.0, top_p=0.9, repetition_penalty=1.3)
    made = config("out", methods={"chain": METHODS["chain"]}, sampling=sampling, repeats=2)
    evaluate(made)
    # which repeat's text counts depends on its time, and no text may be refused by chance
    with patch("os.getloadavg", return_value=(99.0,)), patch("outrider.inference.evaluate.engine.LEVEL", 0.0):
        evaluate(served(made, stand_in(tmp_path, made)))
    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {one["temperature"] for one in asked} == {1.0}
    assert all(one["eos"] == [byte_tokenizer().eos_token_id] for one in asked)
    assert all(one["sampling"] == {"top_p": 0.9, "repetition_penalty": 1.3} for one in asked)
    measured = [one["seeds"] for one in asked if one["drafts"] and one["max_new_tokens"] == made.max_new_tokens]
    assert len({seed for seeds in measured for seed in seeds}) == 2 * len(QUESTIONS)
    found = report(made)
    assert found["served"][0]["identical_to_plain"] is None
    assert found["served"][0]["verdict"] == "undecided"  # of a busy machine
    assert "the load average was 99.0" in (Path(made.out_dir) / "report.md").read_text().partition("## In")[2]
    assert {*found["served_judgement"]} == {PLAIN, DRAFTED}
    for judgement in found["served_judgement"].values():
        assert judgement["texts"] == len(QUESTIONS)  # in both repeats the stand-in says the same
        answers = read_answers(str(Path(made.out_dir) / judgement["file"]), open_target(found["target"]))
        assert len(answers) == len(QUESTIONS)
        assert {replace(SamplingConfig(), **vars(sampling))} == {
            SamplingConfig(**{key: getattr(answer, key) for key in vars(sampling)}) for answer in answers.values()
        }


@pytest.mark.slow
def test_an_engine_loads_what_the_run_says(tiny_models: Path, tmp_path: Path) -> None:
    """Each arm its drafter, with room for the texts; what a table drafts here is what its class drafts there."""
    methods = {
        "table": MethodConfig("ngrams", ngrams=NgramConfig(evidence="mixed", depth=3)),
        "lm": MethodConfig("small_lm", stop=StopConfig(max_draft=2)),
        "lookup": MethodConfig("prompt_lookup", max_ngram=5, stop=StopConfig(max_draft=4)),
    }
    target, table = (str(tiny_models / name) for name in (TARGET, TABLE))
    made = EvaluateConfig(target=target, table=table, small_lm=str(tiny_models / SMALL_LM), methods=methods, threads=1,
                          max_new_tokens=12, device="cpu", dtype="bfloat16", show_prompts=0, template="none",
                          ignore_eos=True, out_dir=str(tmp_path / "out"))  # fmt: skip
    evaluate(made)
    with patch("outrider.inference.measure.replay.chain_rounds", return_value=[(3, (1, 2), 0.0)] * 4) as by_the_table:
        evaluate(
            served(made, stand_in(tmp_path, made), engine="vllm", concurrency=(1, 2), engine_options={"some": [1]})
        )
    plain, *drafted = [json.loads(line) for line in (tmp_path / "log.jobs").read_text().splitlines()]
    texts = [one.turns[0] for one in read_results(Path(made.out_dir)).values()]
    longest = max(len(text.prompt) for text in texts) + made.max_new_tokens
    for job in (plain, *drafted):
        assert (job["target"], job["dtype"], job["device"]) == (target, "bfloat16", "cpu")
        assert (job["options"], job["most"]) == ({"some": [1]}, 2)
        assert longest <= job["context"] <= load_config(target).max_position_embeddings
        assert job["variables"]["CUDA_VISIBLE_DEVICES"] == ""
    assert plain["draft"] is None
    exported = str(Path(made.out_dir).resolve() / FOLDER / "small_lm")
    assert [(job["draft"]["method"], job["draft"]["model"], job["draft"]["tokens"]) for job in drafted] == [
        ("custom_class", "outrider.inference.serving.proposer.NgramProposer", 3),
        ("draft_model", exported, 2),
        ("ngram", None, 4),
    ]
    assert drafted[2]["draft"]["max_ngram"] == 5
    assert drafted[0]["variables"]["OUTRIDER_TABLE"] == str(Path(table).resolve())
    assert Path(drafted[0]["variables"]["PYTHONPATH"], *NgramProposer.__module__.split(".")).with_suffix(".py").exists()
    assert [*AutoTokenizer.from_pretrained(exported).get_vocab()]
    rows = json.loads((Path(made.out_dir) / "report.json").read_text())["reports"][0]["served"]
    assert [row["tau_here"] for row in rows] == [2.0, 2.0]
    texts_said = [(text.prompt, text.generations[AUTOREGRESSIVE].tokens, 3) for text in texts]
    assert [call.args[1:] for call in by_the_table.call_args_list] == 2 * texts_said


def test_a_head_of_the_target_is_served_from_the_targets_directory(tmp_path: Path) -> None:
    """One elsewhere is not served: it would not be found."""
    method = MethodConfig("mtp", stop=StopConfig(max_draft=3))
    target: Any = SimpleNamespace(source="m", revision=None, files=SimpleNamespace(original=None))
    setup: Any = SimpleNamespace(target=target, dtype=torch.float32)
    config = EngineConfig(target="m", mtp="target", engine="vllm", methods={"mtp": method})
    assert engine_blocks._export_drafter(config, setup, method, tmp_path) == "m"
    refusal("restore-mtp", engine_blocks._export_drafter, replace(config, mtp="else"), setup, method, tmp_path)
    other = replace(config, reading=ReadingChanges(target_norm=True))
    refusal("the engine reads the mtp head", engine_blocks._export_drafter, other, setup, method, tmp_path)
    assert refusal_of("openvino", method) is not None


def a_text(accepted: int, rounds: int = 6, first: int = 1, seconds: float = 0.1) -> Generation:
    """The first step says `first` tokens, and each round `accepted` ones and one more."""
    said = Round((1,) * (accepted + 1), 2, accepted, 2, seconds)
    return Generation(tuple(range(first + rounds * (accepted + 1))), 0.1, rounds * seconds, (said,) * rounds)


def a_row(
    texts: list[tuple[Generation, Generation]], repeats: int = 1, here: Callable[[int], int] = lambda place: 1
) -> ServedRow:
    """Of the engine's plain and drafted texts; here: by prompt, how many tokens this runtime accepted in each round."""
    results = [
        PromptResult(f"{place}/{repeat}", "", (0,), {AUTOREGRESSIVE: plain, "m": drafted}, AUTOREGRESSIVE,
                     conversation=str(place))
        for repeat in range(repeats) for place, (plain, drafted) in enumerate(texts)
    ]  # fmt: skip
    ours = [a_text(here(int(str(result.conversation)))) for result in results]
    run = EngineRun(engine="e", concurrency=1, method="m", drafted=2, results=results, here=ours, references=None,
                    totals={PLAIN: 1.0, DRAFTED: 1.0}, load=MachineLoad())  # fmt: skip
    return served_row(run, Streams(0))


def in_report(source: str, *rows: ServedRow) -> MethodReport:
    """A report of a drafter of that kind with these rows."""
    arms = {AUTOREGRESSIVE: a_text(0), "m": a_text(2)}
    made = report_of([PromptResult("p", "", (0,), arms, AUTOREGRESSIVE)])
    return replace(made, settings={"source": source}, served=rows)


def differing(row: ServedRow) -> list[bool]:
    return [share.differs for share in row.acceptance]


def test_a_speed_up_is_of_what_follows_the_first_step() -> None:
    """Which may hold drafted tokens; a text that has no others has no speed."""
    drafted = a_text(2, rounds=2, first=3, seconds=1.5)  # 0.5 seconds a token
    texts = [(a_text(0, rounds=8, seconds=1.0), drafted)] * 5
    assert a_row(texts).speedup.median == pytest.approx(2)
    short = [(a_text(0, rounds=3), a_text(0, rounds=0, first=4)), (a_text(0, rounds=0), a_text(0, rounds=0))]
    assert a_row([*texts, *short]).speedup == a_row(texts).speedup
    assert a_row(short).speedup.median is None


def test_repeats_and_few_prompts_make_nothing_sure() -> None:
    texts = [(a_text(0), a_text(place % 3)) for place in range(8)]
    assert a_row(texts).acceptance == a_row(texts, repeats=4).acceptance
    assert not any(differing(a_row([(a_text(0), a_text(2))] * 4)))
    assert differing(a_row([(a_text(0), a_text(2))] * 5))[1]


def test_the_words_on_a_difference() -> None:
    """A look-up of the engine's own, or its own schedule, is no drafter that could be misread."""
    row = a_row([(a_text(0), a_text(2))] * 5)

    def words(source: str, **changes: object) -> str:
        return "".join(served_lines([in_report(source, replace(row, **changes))]))

    assert "doctor=true" in words("early_exit")
    assert "doctor=true" not in words("prompt_lookup")
    option = {"num_speculative_tokens_per_batch_size": [[1, 2, 0]]}
    assert "doctor=true" not in words("early_exit", options={"speculative_config": option})
    assert "Draft lengths that pay for early_exit" in words("early_exit")
    looping = replace(row.speedup, prompts=4)
    for unsure in ({"load": MachineLoad(busy="The machine was busy.")}, {"speedup_without_loops": looping}):
        assert "Draft lengths" not in words("early_exit", **unsure)


@pytest.mark.parametrize("prompts", [1, 5, 8, 13, 24, 100])
def test_every_block_has_as_many_prompts_as_requests_at_a_time(prompts: int, config: MakeConfig) -> None:
    """Of as many as there are; each prompt is in one block of each repeat."""
    made = in_engine(config("out", repeats=2, methods={"chain": METHODS["chain"]}), engine="vllm", concurrency=(1, 4))
    keys = [*block_keys(made, "chain", range(3, 3 + prompts))]
    for count in (1, 4):
        for repeat in (0, 1):
            blocks = [key.positions for key in keys if (key.concurrency, key.repeat) == (count, repeat)]
            assert [place for block in blocks for place in block] == [*range(3, 3 + prompts)]
            assert min(map(len, blocks)) >= min(count, prompts)
            assert max(map(len, blocks)) < 2 * 3 * count
    assert len(set(keys)) == len(keys)
    other = {*block_keys(replace(made, engine_python="/other"), "chain", range(3, 3 + prompts))}
    assert not other & {*keys}  # what another environment said is measured again


@pytest.mark.parametrize(("changes", "device", "taken", "processes", "named"), [
    ({}, "cpu", {}, 2, "engine='vllm': expected null with 2 processes"),
    ({"concurrency": (1, 9)}, "cpu", {}, 1, "concurrency=9: expected at most 8"),
    ({"engine": "openvino"}, "cuda", {}, 1, "device='cuda': expected cpu"),
    ({}, "cuda:1", {}, 1, "device='cuda:1': expected cpu or cuda"),
    ({}, "cpu", {"min_length": 3, "repetition_penalty": 2.0}, 1, r"generation_config=\['min_length'\]"),
])  # fmt: skip
def test_what_an_engine_cannot_measure_is_said_first(
    changes: dict[str, Any], device: str, taken: dict[str, Any], processes: int, named: str, config: MakeConfig
) -> None:
    made = in_engine(config("out", methods={"chain": METHODS["chain"]}), **{"engine": "vllm", **changes})
    whole = SimpleNamespace(files=SimpleNamespace(wrapper_prefix=""), source="target")
    setup: Any = SimpleNamespace(device=torch.device(device), inherited=SimpleNamespace(fields=taken), target=whole)
    refusal(named, require_served, made, setup, 8, processes)


@pytest.mark.slow
def test_what_an_engine_lacks_is_said_before_texts(config: MakeConfig, models: Path, tmp_path: Path) -> None:
    """Before anything is measured: that it is there, and that it runs such a drafter."""
    save_exit(tmp_path / "several", models / "target", 1, parallel=2)
    several: dict[str, Any] = {"engine": "transformers", "checkpoint": str(tmp_path / "several")}
    for changes, words in (({"engine": "vllm", "engine_python": __file__}, "engine_python"), (several, "no engine")):
        made = in_engine(config("out", methods={"chain": METHODS["chain"]}), **changes)
        refusal(words, evaluate, made)
        assert not list(Path(made.out_dir).glob("r*"))


def test_an_acceptance_that_differs_is_named() -> None:
    """By the depth from which it does."""

    def row(there: Callable[[int], int]) -> ServedRow:
        return a_row([(a_text(0), a_text(there(place))) for place in range(8)], here=lambda place: place % 2)

    assert differing(row(lambda place: place % 2)) == [False, False]
    assert differing(odd := row(lambda place: 1)) == [True, False]
    assert differing(row(lambda place: 2 * (place % 2))) == [False, True]
    assert "at depth 1" in "".join(served_lines([in_report("early_exit", odd)]))


def test_the_draft_length_that_pays() -> None:
    made = a_row([(a_text(0), a_text(2))] * 5)

    def row(requests: int, k: int, median: float, verdict: str = "faster") -> ServedRow:
        speed = MedianInterval(median, (median, median), 5)
        return replace(made, concurrency=requests, draft_tokens=k, speedup_without_loops=speed, verdict=verdict)

    rows = [row(1, 2, 1.5), row(1, 4, 1.8), row(4, 2, 1.2), row(4, 4, 1.3, "undecided"), row(8, 2, 0.9, "slower")]
    assert choose_lengths(rows) == [(1, 1, 4), (2, 4, 2), (5, 8, 0)]


def engine_rows(source: str, engine: str) -> list[MethodReport]:
    """Reports of drafts of 1 and 3 tokens, for 1 and 4 requests: a step takes 1.2 to 3 of plain decoding's seconds."""
    shares, costs = (0.8, 0.5, 0.25), {(1, 1): 1.2, (1, 3): 1.6, (4, 1): 1.5, (4, 3): 3.0}
    made, reports = a_row([(a_text(0), a_text(2))] * 5), []
    for k in (1, 3):
        rows, tau = [], 1 + sum(shares[:k])
        for count in (1, 4):
            gain = tau / costs[count, k]
            speed = MedianInterval(gain, (gain - 0.1, gain + 0.1), 8)
            depths = tuple(DepthShare(i, share, share, (0.0, 0.0), False) for i, share in enumerate(shares[:k], 1))
            rows.append(replace(
                made, engine=engine, concurrency=count, draft_tokens=k, tau=tau, rounds=50, acceptance=depths,
                seconds_per_token={PLAIN: 2.0, DRAFTED: 2.0 / gain}, speedup=speed, speedup_without_loops=speed,
                verdict="faster" if gain > 1.1 else "slower",
            ))  # fmt: skip
        reports.append(in_report(source, *rows))
    return reports


def test_the_speed_up_to_expect_and_what_the_table_gains() -> None:
    """Of a length that was not measured, a step costs what lies between."""
    said = "\n".join(schedule_lines(engine_rows("early_exit", "vllm-1")))
    assert (
        "by requests at a time: 1: K = 3, 2–4: K = 1. Over K = 3 everywhere this gains 1.00× at 1, 1.41× at 4" in said
    )
    at_1, at_4 = (f"{2.3 / cost:.2f}×, " for cost in (1.4, 2.25))
    assert f"- 1 at a time, the speed-up expected of acceptance and seconds of a step (measured): K = 1 1.50× (1.50× " \
           f"[1.40, 1.60]), K = 2 {at_1}K = 3 1.59× (1.59× [1.49, 1.69])." in said  # fmt: skip
    assert f"K = 2 {at_4}K = 3 0.85×" in said
    assert "expected" not in "".join(
        schedule_lines(engine_rows("early_exit", "e")[1:])
    )  # of one length nothing else is known


@pytest.mark.parametrize(("source", "engine", "option"), [
    (
        "eagle3",
        "vllm-1",
        {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 4, 1]]},
    ),
    ("eagle3", "sglang 1", {"1": {"candidate_steps": [3]}, "2": {"candidate_steps": [1]}}),
    ("early_exit", "sglang 1", None),  # it adapts EAGLE's drafts alone
    ("eagle3", "llamacpp b1", None),
])  # fmt: skip
def test_the_table_as_the_engine_reads_it(source: str, engine: str, option: dict[str, Any] | None) -> None:
    found = [line for line in schedule_lines(engine_rows(source, engine)) if line.startswith("{")]
    assert [json.loads(line) for line in found] == ([option] if option else [])


def test_what_an_engine_cannot_run_is_said() -> None:
    chain, tree = METHODS["chain"], METHODS["tree"]
    assert refusal_of("vllm", chain) is None
    for method, reason in (
        (tree, "chains of fixed length"),
        (replace(chain, stop=StopConfig(rule="confidence")), "chains of fixed length"),
        (replace(chain, stop=StopConfig(max_draft="auto")), "draft_tokens"),
        (MethodConfig("skip_layers"), "skip_layers"),
        (MethodConfig("ngrams"), "mixed"),
        (MethodConfig("ngrams", ngrams=NgramConfig(evidence="mixed", recycle=2)), "no other option"),
        (MethodConfig("small_lm", verify="naive"), "exactly"),
        (MethodConfig("small_lm", copy=3), "not by both"),
    ):
        assert reason in str(refusal_of("vllm", method))
    assert {name for name, kind in KINDS.items() if kind.vllm_method not in DRAFTS["openvino"]} >= {"eagle3", "ngrams"}
    methods = {"chain": chain, "tree": tree, "ngrams": MethodConfig("ngrams", ngrams=NgramConfig(evidence="mixed"))}
    many = with_lengths("vllm", methods, (1, 5))
    assert {name: draft_length(one) for name, one in many.items() if name != "tree"} == {
        "chain_k1": 1, "chain_k5": 5, "ngrams_k1": 1, "ngrams_k5": 5,
    }  # fmt: skip
    assert many["tree"] == tree
    survival = {"survival": replace(chain, stop=StopConfig(rule="survival"))}
    assert with_lengths("vllm", survival, (99,)) == survival  # of which it cannot be, but no engine runs it

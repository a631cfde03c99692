"""A server that runs already beside this runtime: what is made of what it streams, counts, and gets wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from outrider.base.errors import UserError
from outrider.inference.batch.server import rounds_of_timings
from outrider.inference.report.served import served_lines
from outrider.inference.report.types import DRAFTED, PLAIN, read_reports
from outrider.inference.settings.engine import EngineConfig
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import AUTOREGRESSIVE
from outrider.inference.settings.sampling import SamplingConfig
from tests.inference.evaluate import evaluating
from tests.inference.evaluate.evaluating import METHODS, QUESTIONS, evaluate, in_engine
from tests.inference.evaluate.server_stand_in import Plan, running
from tests.refusals import refusal
from tests.tiny import byte_tokenizer

pytestmark = pytest.mark.usefixtures("on_the_cpu", "quick")
MakeConfig = Callable[..., EvaluateConfig]
CHAIN = {"chain": METHODS["chain"]}
LENGTH = 3  # of its drafts


@pytest.fixture
def made(config: MakeConfig) -> EvaluateConfig:
    """An evaluation that was measured here."""
    found = config("out", methods=CHAIN)
    evaluate(found)
    return found


def plan_of(made: EvaluateConfig, **changes: Any) -> Plan:
    """A server that does as this runtime did, with a drafter unless it has no length."""
    said = evaluating.measured(made)
    accepted = {prompt: [r.accepted for r in arms["chain"].rounds] for prompt, arms in said.items()}
    texts = {prompt: [*arms[AUTOREGRESSIVE].tokens] for prompt, arms in said.items()}
    given = {"length": LENGTH, "accepted": accepted, "decode": decode, **changes}
    return Plan(texts=texts, **{**given, "accepted": given["accepted"] if given["length"] else {}})


def decode(tokens: list[int]) -> str:
    return str(byte_tokenizer().decode(tokens, skip_special_tokens=True))


def asked(made: EvaluateConfig, url: str, **changes: Any) -> EngineConfig:
    return in_engine(made, **{"engine": url, "resume": True, **changes})


def measured(made: EvaluateConfig, drafts: Plan, plain: Plan | None = None, **changes: Any) -> dict[str, Any]:
    """The report of an evaluation on an idle machine."""
    with patch("os.getloadavg", return_value=(0.1,)), running(drafts) as url, running(plain or drafts) as twin:
        evaluate(asked(made, url, engine_plain=twin if plain else None, **changes))
    found: dict[str, Any] = json.loads((Path(made.out_dir) / "report.json").read_text())
    return found


@pytest.mark.slow
def test_of_a_server_that_does_as_we_do(made: EvaluateConfig) -> None:
    """The same acceptance at every depth, where rounds come one by one; texts, steps and seconds of both arms."""
    drafts, plain = plan_of(made), plan_of(made, length=0)
    found = measured(made, drafts, plain, concurrency=(1, 4))
    for row in found["served"]:
        assert row["engine"] == "vllm-1"
        assert row["identical_to_plain"] == row["plain_identical_to_reference"] == len(QUESTIONS)
        assert row["tau"] == row["tau_here"]
        assert [one["served"] for one in row["acceptance"]] == [one["here"] for one in row["acceptance"]]
        assert row["rounds"] == sum(len(counts) - 1 for counts in drafts.accepted.values())
        assert {*row["tokens_per_second"]} == {*row["seconds_per_token"]} == {PLAIN, DRAFTED}
        assert row["speedup"]["prompts"] > 0
    assert "served_judgement" not in found
    text = (Path(made.out_dir) / "report.md").read_text()
    assert "## In vllm-1" in text
    for body in (drafts.asked[-1], plain.asked[-1]):
        assert (body["stream"], body["temperature"], body["logprobs"]) == (True, 0, None)  # these would take time
        assert body["max_tokens"] == made.max_new_tokens
        assert "ignore_eos" not in body


@pytest.mark.slow
def test_rounds_that_come_together_are_counted_by_the_server(made: EvaluateConfig) -> None:
    """By all of them, the last one of a text too; there is no twin, so no speed-up."""
    drafts = plan_of(made, together=2)
    (row,) = measured(made, drafts, concurrency=(4,))["served"]
    rounds = [count for counts in drafts.accepted.values() for count in counts]
    shares = [sum(count > place for count in rounds) / len(rounds) for place in range(LENGTH)]
    assert [one["served"] for one in row["acceptance"]] == pytest.approx(shares)
    assert row["rounds"] == len(rounds)
    assert row["tau"] == pytest.approx(1 + sum(shares))
    assert row["tau_here"] > 1
    assert row["speedup"]["median"] is None
    assert {*row["tokens_per_second"]} == {DRAFTED}
    assert (row["identical_to_plain"], row["identical_to_reference"]) == (None, len(QUESTIONS))
    assert f"({len(QUESTIONS)}/{len(QUESTIONS)})" in "".join(
        served_lines(read_reports(Path(made.out_dir) / "report.json", ""))
    )


@pytest.mark.slow
def test_steps_without_a_draft_are_rounds_too(made: EvaluateConfig) -> None:
    """Of a server that drafts now and then, as from n-grams."""
    drafts = plan_of(made)
    drafts.accepted = {prompt: counts[:1] for prompt, counts in drafts.accepted.items()}
    (row,) = measured(made, drafts)["served"]
    accepted, said = sum(map(sum, drafts.accepted.values())), sum(len(text) - 1 for text in drafts.texts.values())
    assert row["rounds"] == said - accepted > len(drafts.accepted)
    assert row["tau"] == pytest.approx(said / row["rounds"])


@pytest.mark.slow
def test_a_server_without_ids_is_read_by_its_texts(made: EvaluateConfig) -> None:
    """Which may have been other tokens, then they are not judged. llama.cpp's chunks tell its rounds."""
    drafts = plan_of(made, ids=False, timings=True)
    found = measured(made, drafts)
    (row,), texts = found["served"], drafts.texts.values()
    unread = sum(byte_tokenizer()(decode(text), add_special_tokens=False)["input_ids"] != text for text in texts)
    assert (row["retokenised"], row["unread"]) == (len(QUESTIONS), unread)
    assert row["identical_to_reference"] == len(QUESTIONS) - unread
    assert "served_judgement" not in found
    assert [one["served"] for one in row["acceptance"]] == [one["here"] for one in row["acceptance"]]
    assert (row["rounds"], row["tau"]) == (sum(len(counts) - 1 for counts in drafts.accepted.values()), row["tau_here"])
    assert f"{unread} of them are not tokenised so" in (Path(made.out_dir) / "report.md").read_text()


def test_rounds_by_running_totals() -> None:
    """Chunks of a token, after totals of the round; several rounds in a chunk; none by the last total alone."""

    def told(*totals: tuple[int, int]) -> list[tuple[float, int]]:
        names = ("predicted_n", "draft_n_accepted")
        return rounds_of_timings([(at, dict(zip(names, pair, strict=True))) for at, pair in enumerate(totals)], 9, "s")

    assert told((1, 0), (2, 2), (3, 2), (4, 2), (5, 2), (6, 3)) == [(0, 1), (1, 4), (4, 5), (5, 7)]
    assert told((1, 0), (3, 0), (99, 0)) == [(0, 1), (1, 2), (1, 3), *((2, end) for end in range(4, 10))]
    assert told((8, 4)) == []
    refusal("s: timings", rounds_of_timings, [(0.0, {}), (1.0, {"predicted_n": "many"})], 9, "s")


@pytest.mark.slow
def test_a_server_chooses_tokens_as_the_run_does(config: MakeConfig) -> None:
    """And draws each answer by a seed of its own; all of these are audited."""
    sampling = SamplingConfig(temperature=1.0, top_p=0.9, repetition_penalty=1.3)
    made = config("out", methods=CHAIN, sampling=sampling, ignore_eos=True)
    evaluate(made)
    drafts = plan_of(made)
    with patch("outrider.inference.evaluate.engine.LEVEL", 0.0):  # no text may be refused by chance
        found = measured(made, drafts)
    asked = [body for body in drafts.asked if body["max_tokens"] == made.max_new_tokens]
    assert {(body["temperature"], body["top_p"], body["repetition_penalty"]) for body in asked} == {(1.0, 0.9, 1.3)}
    assert all(body["ignore_eos"] for body in asked)
    assert len({body["seed"] for body in asked}) == len(asked) == len(QUESTIONS)
    assert found["served"][0]["identical_to_reference"] is None
    assert found["served_judgement"][DRAFTED]["texts"] == len(QUESTIONS)


@pytest.mark.slow
def test_what_a_server_does_not_count_is_not_known(made: EvaluateConfig) -> None:
    (row,) = measured(made, plan_of(made, timings=True, length=0))["served"]
    assert (row["tau"], row["rounds"], row["acceptance"]) == (None, None, [])
    assert row["identical_to_reference"] == len(QUESTIONS)
    with pytest.raises(UserError, match=r"engine_plain=.*expected a server without a drafter"):
        measured(made, plan_of(made), plan_of(made, timings=True), resume=False, out_dir=f"{made.out_dir}-again")
    assert "| – |" in (Path(made.out_dir) / "report.md").read_text().partition("## In")[2]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [{"drafts": 9}, {"accepted_tokens": 2}, {"accepted_tokens_per_pos": 2}])
def test_counts_that_no_texts_can_have_are_refused(counts: dict[str, int], made: EvaluateConfig) -> None:
    """As those of two clients are."""
    with pytest.raises(UserError, match=r"engine=.*: expected counts that .* tokens in drafts of 3 can have"):
        measured(made, plan_of(made, counts=counts))


def test_what_a_server_lacks_is_said_before_anything_is_measured(config: MakeConfig) -> None:
    made = config("out", methods=CHAIN, template="none")

    def plan(length: int = LENGTH, **changes: Any) -> Plan:
        return Plan(**{"decode": decode, "texts": {}, "length": length, **changes})

    with running(plan()) as gone:
        pass
    refusal(r"engine=.*/v1/models gave no reply", evaluate, in_engine(made, engine=gone))
    for drafts, twin, changes, words in (
        (plan(streams=False), None, {}, "engine=.*it does not stream"),
        (plan(ends=False), None, {}, "engine=.*a stream without an end"),
        (plan(usage=[7]), None, {}, "engine=.*no reply that can be read"),
        (plan(2), None, {}, "engine=.*a server that drafts 3 tokens: this one 2"),
        (plan(0), None, {}, "engine=.*a server that drafts 3 tokens: this one 0"),
        (plan(), plan(), {}, "engine_plain=.*a server that drafts 0 tokens: this one 3"),
        (plan(), None, {"server_model": "huge"}, "lists tiny, not server_model=huge"),
        (plan(read=str.upper), None, {}, "engine=.*a server of .*'ABCD' is 'abcd'"),
    ):
        with running(drafts) as url, running(twin or drafts) as other, pytest.raises(UserError, match=words):
            evaluate(in_engine(made, engine=url, engine_plain=other if twin else None, **changes))
    assert not list(Path(made.out_dir).glob("r*"))

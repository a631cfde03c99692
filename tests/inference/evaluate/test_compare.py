"""What an evaluation does with its prompts: the order of arms, conversations, and what is judged."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from outrider import preset
from outrider.base.streams import Streams
from outrider.data_prep.text.prompts import Prompt
from outrider.draft_models.targets.open_target import load_tokenizer
from outrider.draft_models.targets.vocabulary import UnusableTextError
from outrider.inference.core import batch as core
from outrider.inference.core.batch import Batch, PassRequest, run_jointly
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.evaluate import evaluation
from outrider.inference.measure import arms, bench, prepared
from outrider.inference.measure.results import Arm, read_results
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.sizing.costs import Costs
from tests.inference.evaluate.evaluating import METHODS, QUESTIONS, evaluate, killed_after, refused, tokens
from tests.inference.priced import costs, price
from tests.support.planted_faults import rope_scaled
from tests.tiny import unproven


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "firsts"), [(None, (0, 1, 2, 2)), (60.0, (0, 1, 2, 0))])
def test_arms_are_warm_and_take_turns_at_being_first(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch, minutes: float | None, firsts: Sequence[int]
) -> None:
    """With minutes the first, the last and then the second conversation are measured."""
    calls: list[tuple[int, str]] = []
    make = bench.make_arms

    def noted(*given: object, **options: object) -> dict[str, Arm]:
        def noting(name: str, arm: Arm) -> Arm:
            return lambda *of_arm: (calls.append((text.max_new_tokens, name)), arm(*of_arm))[1]

        text, arms = given[-1], make(*given, **options)  # type: ignore[arg-type]
        return {name: noting(name, arm) for name, arm in arms.items()}

    monkeypatch.setattr(bench, "make_arms", noted)
    evaluate(
        config("turns", methods={"chain": METHODS["chain"]}, show_prompts=0, minutes=minutes), QUESTIONS[:3]
    )  # the second has two turns
    names = ["autoregressive", "chain", "transformers_generate"]
    measured = [name for first in firsts for name in names[first:] + names[:first]]
    assert calls == [(8, name) for name in names] + [(10, name) for name in measured]


def test_a_conversation_goes_on_with_the_targets_own_answers(
    models: Path, config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn beyond the context ends it. What is decoded is rendered once."""
    seen: list[list[str]] = []
    written: list[Sequence[Sequence[int]]] = []

    def noted(
        texts: Sequence[Any], _: object, template: str, *, answer_ids: Sequence[Sequence[int]], context: int, where: str
    ) -> list[int]:
        assert template == "vicuna"
        assert where == "prompt p"
        seen.append([message["content"] for message in texts])
        written.append(answer_ids)
        return [byte % 250 for byte in seen[-1][-1].encode()]

    monkeypatch.setattr(prepared, "render_prompt", noted)
    price(monkeypatch, costs(step=0.0, node=0.0))  # so that every draft pays
    auto = MethodConfig(stop=StopConfig(max_draft="auto"))
    made = config("talk", methods={"auto": auto}, template="vicuna")
    turns = ("x" * 246, "and then?", "x" * 247, "never asked")  # of 256 positions, 10 are for the answer
    evaluation.evaluate_checkpoint(made, [Prompt("p", "chat", turns, True)])
    results = read_results(Path(made.out_dir))[0].turns
    assert [r.prompt_id for r in results] == ["p/turn1", "p/turn2"]
    assert [r.conversation for r in results] == ["p", "p"]
    tokenizer = load_tokenizer(str(models / "target"))
    said = [tokenizer.decode(list(r.generations["autoregressive"].tokens), skip_special_tokens=True) for r in results]
    talk = [turns[0], said[0], turns[1], said[1], turns[2]]
    alone = [[turn] for turn in turns]  # to see whether the first fits, and how long the texts may get
    assert seen == [*alone, talk[:3], talk]
    own = [r.generations["autoregressive"].tokens for r in results]  # as which it is read again
    assert [list(map(tuple, said)) for said in written[-2:]] == [own[:1], own]
    report = json.loads((Path(made.out_dir) / "report.json").read_text())
    assert report["auto"]["costs"]["autoregressive_step"] == 1.0
    assert set(report["auto"]["chosen"]) == {"max_draft"}
    assert report["skipped"] == [
        {"prompt_id": "p/turn3", "reason": "247 tokens and 10 new ones in a context of 256"},
        {"prompt_id": "p/turn4", "reason": "a turn before it was left out"},
    ]


def test_a_turn_that_an_answer_makes_unusable_ends_its_conversation(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read again as text, an answer may have a token that the model has no row for; the run goes on."""

    def refusing(texts: Sequence[Any], *_: object, **__: object) -> list[int]:
        if len(texts) > 1:
            raise UnusableTextError("holds the token", "token")
        return [byte % 250 for byte in texts[-1]["content"].encode()]

    monkeypatch.setattr(prepared, "render_prompt", refusing)
    made = config("unusable", template="vicuna")
    evaluate(made, [Prompt("p", "chat", ("who?", "and?"), True), Prompt("q", "text", ("once",), False)])
    report = json.loads((Path(made.out_dir) / "report.json").read_text())["reports"][0]
    assert report["skipped"] == [{"prompt_id": "p/turn2", "reason": "holds the token"}]
    assert report["turns"] == 2


@pytest.mark.slow
def test_half_precision_and_sampling_are_judged(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every arm of this runtime on evenly spread prompts, all turns; what was found decides verdict and exit status."""
    monkeypatch.setattr(bench, "JUDGED_PROMPTS", 2)
    half = config("half", dtype="bfloat16")
    sampled = config("sampled", sampling=SamplingConfig(temperature=1.0))
    for made in (half, sampled):
        evaluate(made, QUESTIONS * 2 if made is half else QUESTIONS)
        first = [found.turns[0] for found in read_results(Path(made.out_dir)).values()]
        differing = sum(not all(map(one.identical, one.generations)) for one in first) if made is half else 0
        assert bench.JUDGED_PROMPTS <= sum(bool(one.deviations) for one in first) <= bench.JUDGED_PROMPTS + differing
        for report in json.loads((Path(made.out_dir) / "report.json").read_text())["reports"]:
            for arm in ("autoregressive", report["method"]):
                assert report["lossless"]["judged"][arm]["faults"] == []
        said = (Path(made.out_dir) / "report.md").read_text()
        assert "none above rounding" in said
        assert ("dtype=float32" in said) == (made is half)  # the check that sees smaller ones
    for made in (replace(half, out_dir=half.out_dir + "!"), replace(sampled, out_dir=sampled.out_dir + "!")):
        with rope_scaled(1.01), unproven(), pytest.raises(SystemExit) as left:
            evaluate(made, QUESTIONS[:3])
        assert left.value.code == 1
        for report in json.loads((Path(made.out_dir) / "report.json").read_text())["reports"]:
            assert report["verdict"] == "target differs"  # plain decoding, too: no method is to blame
            assert "keys of layer 0" in report["lossless"]["judged"]["autoregressive"]["faults"][0]


AUTO = MethodConfig(stop=StopConfig(max_draft="auto"))
FOUR = QUESTIONS[:4]  # the second and the fourth have two turns


def report_of(config: EvaluateConfig, number: int = 0) -> dict[str, Any]:
    return json.loads((Path(config.out_dir) / "report.json").read_text())["reports"][number]


def test_texts_at_once_are_those_one_after_another(
    config: Callable[..., EvaluateConfig], alone: EvaluateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, beside, shared_by = list[int](), set[int](), Costs.shared_by
    price(monkeypatch, costs(step=0.01, node=0.0))
    monkeypatch.setattr(core, "run_jointly", lambda asked: sizes.append(len(asked)) or run_jointly(asked))
    monkeypatch.setattr(Costs, "shared_by", lambda costs, texts: beside.add(texts) or shared_by(costs, texts))
    made = config("two", batch=2, show_prompts=1, methods=METHODS | {"auto": AUTO, "default": preset("eesd_survival")})
    evaluate(made, FOUR)
    assert (sizes.count(2) > 20, max(sizes), beside) == (True, 2, {2})
    said, own = tokens(alone), tokens(made)
    assert own.items() >= {key: text for key, text in said.items() if key[0] != "e"}.items()
    assert set(report_of(made, -2)["auto"]["chosen"]) == {"max_draft"}
    report, before = report_of(made), report_of(alone)
    assert (report["texts_at_once"], report["prompts"], report["turns"], report["speedup"]["prompts"]) == (2, 4, 6, 2)
    assert all(report_of(made, n)["lossless"].items() >= {"identical": 6, "checked": 6}.items() for n in range(4))
    parts = report["seconds"]
    assert min(parts.values()) > 0
    assert report["autoregressive"]["token_us"] == pytest.approx(1e6 / report["tokens_per_second"]["autoregressive"])
    assert sum(parts.values()) == pytest.approx((report["tokens"] - 6) / report["tokens_per_second"]["speculative"])
    assert "texts_at_once" not in before
    for one, words in ((made, "by groups of 2 texts at once"), (alone, "prompt by prompt")):
        assert f"interleaved {words}" in (Path(one.out_dir) / "report.md").read_text()


def test_seconds_are_shared_out_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 seconds 2 were prompts'; 9 tokens were decoded. An error of one text is that of all."""
    monkeypatch.setattr(arms.time, "perf_counter", iter((100.0, 120.0, 0.0, 0.0)).__next__)
    rounds = (Round((1,), 2, 0, 2, 4.0, 1.0, 1.0, 2.0), Round((1, 2), 2, 1, 2, 8.0, 2.0, 2.0, 4.0))
    made = [Generation((0, 1, 1, 2), 0.5, 12.0, rounds), Generation((0,) * 7, 1.5, 15.0), Generation((0,), 0.0, 0.0)]
    given, batch = [Streams(0, "p", repeat) for repeat in range(3)], Batch()
    found = arms.decode_all(lambda _, streams: made[streams.repeat], [[1]] * 3, given, batch)
    assert [(one.tokens, one.prefill_seconds, one.decode_seconds) for one in found] == [
        (one.tokens, one.prefill_seconds, seconds) for one, seconds in zip(made, (6.0, 12.0, 0.0), strict=True)
    ]
    halves = [(r.seconds, r.draft_seconds, r.structure_seconds, r.verify_seconds) for r in found[0].rounds]
    assert halves == [(2.0, 0.5, 0.5, 1.0), (4.0, 1.0, 1.0, 2.0)]
    with pytest.raises(IndexError):
        arms.decode_all(lambda _, streams: made[3 * streams.repeat], [[1]] * 3, given, batch)
    assert not batch.texts


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
def test_texts_that_change_each_other_are_not_lossless(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """In half precision they are judged as they were decoded: together."""
    made = config("right", batch=2, **options)
    evaluate(made, FOUR)
    judged = [bool(r.deviations) for one in read_results(Path(made.out_dir)).values() for r in one.turns]
    assert judged == [bool(options)] * 6

    def swapped(asked: list[PassRequest]) -> list[tuple[Tensor, ...]]:
        found = run_jointly(asked)
        same = len({one.rows for one in asked}) == 1 and asked[0].ends_round
        return found[::-1] if same else found

    monkeypatch.setattr(core, "run_jointly", swapped)
    wrong = replace(made, out_dir=made.out_dir + "!")
    with pytest.raises(SystemExit):
        evaluate(wrong, FOUR)
    report = report_of(wrong)
    assert report["verdict"] == "target differs"
    assert not options or report["lossless"]["judged"]["chain"]["peak_at"].startswith("logits")


def test_half_a_group_is_measured_again(config: Callable[..., EvaluateConfig]) -> None:
    made = config("killed", batch=2)
    killed_after(made, 3, FOUR)
    evaluate(replace(made, resume=True), FOUR)
    found = read_results(Path(made.out_dir))
    assert sorted(found) == [0, 1, 2, 3]
    assert len({found[2].spent, found[3].spent}) == 1
    assert report_of(made)["turns"] == 6


def test_what_does_not_go_together_is_named(config: Callable[..., EvaluateConfig]) -> None:
    for count in (3, 8):
        refused(config("no", batch=count), rf"batch={count}: expected a divisor of the 4 prompts", FOUR)
    refused(config("no", batch=2, runtime="graphed"), "batch=2: expected 1 with CUDA graphs", FOUR)

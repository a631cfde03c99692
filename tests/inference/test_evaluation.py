"""Measuring and reporting: statistics by hand, ties, and the command from checkpoint to report."""

import itertools
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.settings import DataConfig, MixPart
from draft_models.checkpoint import fingerprint_target, save_pretrained
from draft_models.target import load_config, load_tokenizer
from draft_models.tensor_files import open_target
from inference.decode import Round
from inference.evaluate_checkpoint import main
from inference.evaluation import (
    AUTOREGRESSIVE,
    TRANSFORMERS,
    Generation,
    PromptResult,
    collect,
    excuse_ties,
    is_tie,
    measure,
    transformers_generate,
    without_captures,
)
from inference.measures import (
    acceptance_by_candidates,
    acceptance_by_position,
    bootstrap_median,
    chosen_sizes,
    decode_statistics,
    structure_statistics,
)
from inference.report import (
    build_report,
    describe_machine,
    is_lossless,
    markdown,
    plot_acceptance,
    plot_speedups,
    relate_to_chain,
)
from inference.settings import EvaluateConfig, MethodConfig, SamplingConfig
from inference.subject import end_tokens, heldout_fraction
from inference.verify import verify_greedy
from tests.tiny import LAYERS, byte_tokenizer, make_drafter, random_prompt, reference_generate, save_target


def generation(outcomes: Sequence[tuple[int, int]], seconds: float) -> Generation:
    """Rounds of (drafted, accepted) tokens, each with its bonus, after one prefill token."""
    rounds = tuple(
        Round(tuple(range(accepted + 1)), drafted, accepted, seconds / 10, seconds / 40, seconds / 80, seconds / 20)
        for drafted, accepted in outcomes
    )
    tokens = (7, *(token for r in rounds for token in r.tokens))
    return Generation(tokens, 0.5, seconds, rounds)


def test_statistics_by_hand() -> None:
    stats = decode_statistics([generation([(4, 4), (4, 1)], 1.0), generation([(2, 0)], 1.0)])
    assert stats["tau"] == pytest.approx((5 + 2 + 1) / 3)
    assert stats["acceptance_rate"] == pytest.approx(5 / 10)
    assert stats["draft_share"] == pytest.approx(5 / 10)  # 8 decoded tokens and 2 of the prefills
    assert stats["harmonic_mean"] == pytest.approx(0.5)
    assert stats["drafted_tokens_per_round"] == pytest.approx(10 / 3)
    assert decode_statistics([])["tau"] == 0


def test_acceptance_by_position_by_hand() -> None:
    table = acceptance_by_position([generation([(3, 3), (3, 1), (1, 0), (1, 1)], 1.0)])
    assert [(row["position"], row["rounds"]) for row in table] == [(1, 4), (2, 2), (3, 2)]
    assert [row["accepted"] for row in table] == pytest.approx([3 / 4, 1 / 2, 1 / 2])


def test_bootstrap_interval() -> None:
    values = [1.0 + i / 100 for i in range(101)]
    median, (low, high) = bootstrap_median(values, seed=0)
    assert median == 1.5
    assert 1.3 < low < 1.5 < high < 1.7
    assert bootstrap_median(values, seed=0) == bootstrap_median(values, seed=0)
    assert bootstrap_median([2.0] * 5, seed=1) == (2.0, [2.0, 2.0])
    # Of nine, the resampled median is the smallest with probability 0.1 %, one of the two smallest with 3 %.
    assert bootstrap_median([1.0, 2, 3, 4, 5, 6, 7, 8, 99], seed=0) == (5.0, [2.0, 8.0])


def results() -> list[PromptResult]:
    made = []
    for index, (seconds, category) in enumerate([(2.0, "code"), (3.0, "code"), (4.0, "chat")] * 2):
        draft = generation([(4, 4), (4, 1), (4, 0)], 1.0)
        plain = Generation(draft.tokens, 0.4, seconds, tuple(Round((t,), 0, 0, 0.1) for t in draft.tokens[1:]))
        stock = Generation(draft.tokens, 0.3, 2 * seconds)
        generations = {AUTOREGRESSIVE: plain, TRANSFORMERS: stock, "m": draft}
        made.append(PromptResult(f"p{index}", category, (1, 2), generations, TRANSFORMERS))
    return made


def facts() -> dict[str, object]:
    return {
        "target": "T", "drafter": "D", "dtype": "float32", "device": "cpu", "max_new_tokens": 9,
        "processes": 1,
        "temperature": 0.0, "sampling": asdict(SamplingConfig()), "settings": asdict(MethodConfig()),
    }  # fmt: skip


def test_report_by_hand() -> None:
    report = build_report("m", results(), facts(), seed=0)
    assert report["lossless"]["checked"] == report["lossless"]["identical"] == 6
    assert report["speedup"]["median"] == 3.0
    assert report["speedup"]["vs_transformers_generate"]["median"] == 6.0
    assert report["speedup_per_prompt"] == {"p0": 2.0, "p1": 3.0, "p2": 4.0, "p3": 2.0, "p4": 3.0, "p5": 4.0}
    assert report["tokens_per_second"]["speculative"] == pytest.approx(8.0)
    assert report["tokens_per_second"]["autoregressive"] == pytest.approx(24 / 9)
    assert report["tokens_per_second"]["transformers_generate"] == pytest.approx(12 / 9)
    assert report["prefill_seconds"] == pytest.approx({"autoregressive": 0.4, "speculative": 0.5})
    # A round of 4 drafted tokens takes 1/3 s, a plain token 9/24 s: even where 1 + 4 v tokens cost the same.
    assert report["break_even_acceptance"] == pytest.approx((3 * 24 / 9 - 9) / 36)
    parts = {"draft": 18 / 40, "verify": 18 / 20, "structure": 18 / 80}
    assert report["seconds"] == pytest.approx({**parts, "other": 6.0 - sum(parts.values())})
    assert report["by_category"]["code"]["prompts"] == 4
    assert report["verdict"] == "faster"
    assert is_lossless(report)
    assert "| m | 6/6 | 2.67 | 0.42 | 0.56 | 47.6 | 4.00 | 8.0 | 3.00× [2.00, 4.00] | 6.00× [" in markdown([report])
    profiled = [replace(r, profiles={"m": generation([(4, 4)], 2.0)}) for r in results()]
    assert build_report("m", profiled, facts(), seed=0)["seconds"]["draft"] == pytest.approx(6 * 2.0 / 40)


def test_a_category_is_reported_as_its_prompts_alone_would_be() -> None:
    made = results()
    for r in made:
        if r.category == "chat":
            r.generations["m"] = generation([(4, 4), (4, 2)], 1.0)
    parts = build_report("m", made, facts(), seed=0)["by_category"]
    assert parts["chat"]["tau"] != parts["code"]["tau"]
    for category, part in parts.items():
        alone = build_report("m", [r for r in made if r.category == category], facts(), seed=0)
        del alone["speedup"]["vs_transformers_generate"]
        assert part == {key: alone[key] for key in part}


def test_speed_counts_decoded_tokens_of_prompts_that_have_some() -> None:
    """Each arm's own tokens, as sampled ones differ; a text that ended with the prefill's token has no speed."""
    made = results()
    for r in made:
        r.generations["m"] = generation([(4, 1)], 1.0)  # 2 decoded tokens, and the others 8
    ended = dict.fromkeys(made[0].generations, Generation((7,), 0.5, 0.0))
    made.append(replace(made[0], prompt_id="ended", generations=ended))
    report = build_report("m", made, facts(), seed=0)
    assert report["prompts"] == 7
    assert report["speedup_per_prompt"] == {"p0": 0.5, "p1": 0.75, "p2": 1.0, "p3": 0.5, "p4": 0.75, "p5": 1.0}
    assert report["tokens_per_second"]["speculative"] == pytest.approx(2.0)


def test_excused_mismatches_are_counted_by_arm() -> None:
    made = results()
    for index, (arm, excused) in enumerate([("m", True), (AUTOREGRESSIVE, True), (AUTOREGRESSIVE, False)]):
        wrong = replace(made[index].generations[arm], tokens=(1,) * 9)
        generations = {**made[index].generations, arm: wrong}
        made[index] = replace(made[index], generations=generations, excused=frozenset({arm} if excused else ()))
    report = build_report("m", made, facts(), seed=0)
    assert report["lossless"] == {
        "reference": TRANSFORMERS, "checked": 6, "identical": 5, "excused_ties": 1, "autoregressive_identical": 4,
    }  # fmt: skip
    assert is_lossless(report)
    assert "| m | 5/6 (+1 ties) |" in markdown([report])
    assert not is_lossless(build_report("m", [replace(r, excused=frozenset()) for r in made], facts(), seed=0))


@pytest.mark.parametrize(
    ("seconds", "prompts", "verdict"),
    [
        ([4.0, 4.0], 6, "slower"),
        ([0.1, 0.1], 5, "faster"),
        ([0.1, 0.1], 4, "undecided"),
        ([0.5, 2.0], 6, "undecided"),  # half of the prompts faster, half slower
    ],
)
def test_verdict(seconds: list[float], prompts: int, verdict: str) -> None:
    made = results()[:prompts]
    for index, r in enumerate(made):
        taken = seconds[index % 2] * r.generations[AUTOREGRESSIVE].decode_seconds
        r.generations["m"] = generation([(4, 4), (4, 1), (4, 0)], taken)
    report = build_report("m", made, facts(), seed=0)
    assert report["verdict"] == verdict
    assert ("Undecided with fewer than 5 prompts." in markdown([report])) == (prompts < 5)


def test_plots_of_a_method_that_drafted_nothing() -> None:
    made = [replace(r, generations={**r.generations, "m": generation([(0, 0)], 1.0)}) for r in results()]
    report = build_report("m", made, facts(), seed=0)
    with warnings.catch_warnings(action="error"):
        assert plot_acceptance([report]).axes[0].get_legend() is None
        assert plot_speedups([report]).axes[0].get_legend() is not None


def result_with(prompt: list[int], reference: tuple[int, ...], other: tuple[int, ...]) -> PromptResult:
    arms = {AUTOREGRESSIVE: Generation(reference, 0, 1), "m": Generation(other, 0, 1)}
    return PromptResult("p", "c", tuple(prompt), arms, AUTOREGRESSIVE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_real_ties_in_half_precision_are_excused(tmp_path: Path, dtype: torch.dtype) -> None:
    """A mismatch between two tokens of nearly equal logits is a tie; between any others it is an error."""
    model = AutoModelForCausalLM.from_pretrained(save_target(tmp_path), dtype=dtype)
    prompt = random_prompt(12)
    tokens = tuple(reference_generate(model, prompt, 8))
    twin = next(t for t in range(256) if t not in tokens)
    wrong = (*tokens[:3], twin, *tokens[4:])
    assert excuse_ties(model, result_with(prompt, tokens, wrong)) == frozenset()
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[tokens[3]]
    expected = {"m"} if dtype == torch.bfloat16 else frozenset()
    assert excuse_ties(model, result_with(prompt, tokens, wrong)) == expected
    assert excuse_ties(model, result_with(prompt, tokens, tokens[:-1])) == frozenset()  # shorter is not a tie


class Judge:
    """A target whose fourth logit is 0.5 larger when a text is fed at once, which is all the noise there is."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.config = SimpleNamespace(_attn_implementation="ours")

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def __call__(self, ids: torch.Tensor, use_cache: bool = False, **_: object) -> SimpleNamespace:
        assert self.config._attn_implementation == "sdpa"  # not this project's: it is to be judged
        logits = torch.tensor([5.0, 4.0, 3.0, 0.0 if use_cache else 0.5])
        return SimpleNamespace(logits=logits[None, None], past_key_values=None)


def test_ties_are_within_twice_the_noise_of_the_best_token() -> None:
    judge = Judge()
    tied = {pair for pair in itertools.permutations(range(3), 2) if is_tie(judge, [1], [2, 3], *pair)}
    assert tied == {(0, 1), (1, 0)}
    assert judge.config._attn_implementation == "ours"


def test_a_run_that_captured_graphs_is_run_again() -> None:
    runtime, runs = SimpleNamespace(captures=0), []

    def arm(prompt: Sequence[int]) -> Generation:
        runs.append(prompt)
        runtime.captures += len(runs) < 3
        return Generation((len(runs),), 0, 0)

    assert without_captures(arm, runtime)([1]).tokens == (3,)


def test_measure_rotates_and_takes_the_median(tmp_path: Path) -> None:
    calls = []

    def arm(name: str, seconds: list[float]):
        def run(_prompt: Sequence[int]) -> Generation:
            calls.append(name)
            return Generation((1, 2), 0.1, seconds[calls.count(name) - 1])

        return run

    arms = {AUTOREGRESSIVE: arm(AUTOREGRESSIVE, [3, 1, 2]), "m": arm("m", [5, 6, 4])}
    profilers = {"m": lambda _: Generation((9,), 0, 0)}
    result = measure(arms, [1], prompt_id="p", category="c", repeats=3, turn=1, profilers=profilers)
    assert calls == ["m", AUTOREGRESSIVE, AUTOREGRESSIVE, "m", "m", AUTOREGRESSIVE]
    assert result.generations[AUTOREGRESSIVE].decode_seconds == 2
    assert result.generations["m"].decode_seconds == 5
    assert result.profiles == {"m": Generation((9,), 0, 0)}


def test_prefill_is_timed_apart() -> None:
    now = 0.0

    def rounds() -> Iterator[Round]:
        nonlocal now
        for seconds in (5.0, 1.0, 2.0):
            now += seconds
            yield Round((7,), 0, 0, seconds)

    made = collect(rounds(), lambda: now)
    assert (made.prefill_seconds, made.decode_seconds, made.tokens) == (5.0, 3.0, (7, 7, 7))
    assert [r.seconds for r in made.rounds] == [1.0, 2.0]


def test_transformers_arm_times_prefill_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts the model's passes, of which the first is the prefill."""
    model = AutoModelForCausalLM.from_pretrained(save_target(tmp_path))
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    with monkeypatch.context() as patch:
        patch.setattr("inference.evaluation.time.perf_counter", lambda: float(len(passes)))
        out = transformers_generate(model, random_prompt(9), max_new_tokens=12, eos=())
    assert len(out.tokens) == 12
    assert (out.prefill_seconds, out.decode_seconds) == (1, 11)
    first = out.tokens[4]
    stopped = transformers_generate(model, random_prompt(9), max_new_tokens=12, eos=[first])
    assert stopped.tokens == out.tokens[: out.tokens.index(first) + 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    path = save_target(folder / "target")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    byte_tokenizer(template + "{% if add_generation_prompt %}assistant: {% endif %}").save_pretrained(path)
    fingerprint = fingerprint_target(open_target(str(path)), load_config(str(path)), load_tokenizer(str(path)))
    save_pretrained(folder / "drafter", make_drafter(path, LAYERS - 1, noise=0.05), fingerprint, {}, torch.float32)
    return folder


@pytest.fixture
def command(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable:
    """evaluate-checkpoint in this process: (exit status, stdout, stderr)."""
    monkeypatch.chdir(checkpoint)

    def run(*overrides: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["evaluate-checkpoint", "max_new_tokens=12", "threads=1", *overrides])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_command_from_checkpoint_to_report(checkpoint: Path, command: Callable) -> None:
    """Two methods over a two-turn chat file: one report each, one table, texts and plots."""
    questions = [
        {"question_id": i, "category": c, "turns": [f"question {i}?", "and then?"]}
        for i, c in ((81, "writing"), (91, "math"))
    ]
    (checkpoint / "mt.jsonl").write_text("\n".join(map(json.dumps, questions)))
    status, printed, errors = command(
        "checkpoint=drafter", "prompts=mt.jsonl", "method=[eesd_beta,eesd_fixed]", "out_dir=out", "card=true"
    )
    assert status == 0, errors
    out = checkpoint / "out"
    reports = json.loads((out / "report.json").read_text())["reports"]
    assert [report["method"] for report in reports] == ["eesd_beta", "eesd_fixed"]
    for report in reports:
        assert report["lossless"] == {
            "reference": TRANSFORMERS, "checked": 4, "identical": 4, "excused_ties": 0, "autoregressive_identical": 4,
        }  # fmt: skip
        assert report["tau"] > 1.5
        assert set(report["by_category"]) == {"writing", "math"}
        wanted = {
            "method", "target", "drafter", "dtype", "device", "machine", "prompts", "tokens", "temperature", "seed",
            "lossless", "tau", "acceptance_rate", "draft_share", "harmonic_mean", "drafted_tokens_per_round",
            "tokens_per_second", "speedup", "break_even_acceptance", "seconds", "by_category", "verdict",
        }  # fmt: skip
        assert wanted <= set(report)
        assert set(report["tokens_per_second"]) == {"autoregressive", "transformers_generate", "speculative"}
    table = (out / "report.md").read_text()
    assert table.strip() in printed
    assert "| eesd_beta | 4/4 |" in table
    assert table.partition("\n")[2] in (checkpoint / "drafter/README.md").read_text()
    lines = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * 4
    by_arm = {(line["id"], line["arm"]): line["tokens"] for line in lines}
    assert all(tokens == by_arm[prompt, AUTOREGRESSIVE] for (prompt, _), tokens in by_arm.items())
    for report in reports:
        mine = [line for line in lines if line["arm"] == report["method"]]
        drafted, accepted = (sum(sum(line[key]) for line in mine) for key in ("drafted", "accepted"))
        assert accepted / drafted == pytest.approx(report["acceptance_rate"])
    for plot in ("speedup_per_prompt.png", "acceptance_by_position.png"):
        assert (out / plot).read_bytes().startswith(b"\x89PNG")


def test_command_samples_when_told_to(checkpoint: Path, command: Callable) -> None:
    """Sampled arms have no tokens to compare; the same seed gives the same texts, another one others."""
    texts = []
    for number, seed in enumerate((0, 0, 1)):
        options = ("sampling.temperature=0.8", "sampling.top_k=50", f"seed={seed}", f"out_dir=sampled{number}")
        methods = ["method=[eesd_beta,mcsd,mcsd_naive]", "methods.mcsd.source=early_exit"]
        methods += ["methods.mcsd_naive.source=early_exit", "methods.mcsd_naive.structure.widths=[3,2]"]
        status, _, errors = command("checkpoint=drafter", "prompt_text=[hello]", *methods, *options)
        assert status == 0, errors
        reports = json.loads((checkpoint / f"sampled{number}/report.json").read_text())["reports"]
        lines = (checkpoint / f"sampled{number}/generations.jsonl").read_text().splitlines()
        texts.append({line["arm"]: line["tokens"] for line in map(json.loads, lines)})
    assert texts[0] == texts[1]
    assert all(texts[0][arm] != texts[2][arm] for arm in texts[0])
    assert all(report["temperature"] == 0.8 and report["lossless"]["checked"] == 0 for report in reports)
    assert "sampled (temperature 0.8, top_k 50" in (checkpoint / "sampled0/report.md").read_text()
    shares = {r["method"]: r["acceptance_by_candidates"] for r in reports}
    assert shares["eesd_beta"] == []
    assert 1 <= len(shares["mcsd"]) <= 4
    assert 1 <= len(shares["mcsd_naive"]) <= 3
    assert shares["mcsd"] == sorted(shares["mcsd"])


def test_acceptance_by_candidates_by_hand() -> None:
    made = [
        replace(generation([(6, 1)], 1.0), totals={"nodes_tried": 4, "accepted_candidate_1": 1}),
        replace(generation([(6, 1)], 1.0), totals={"nodes_tried": 6, "accepted_candidate_3": 4, "other": 2.0}),
        generation([(6, 1)], 1.0),
    ]
    assert acceptance_by_candidates(made) == pytest.approx([0.1, 0.1, 0.5])


def test_totals_of_structures_by_hand() -> None:
    chosen = {"chosen_nodes=4": 1, "chosen_nodes=6": 1, "chosen_widths=[2,1]": 2}
    made = [
        replace(generation([(6, 1), (6, 2)], 1.0), totals={"expected_tau": 5.0, "nodes_tried": 4, **chosen}),
        replace(generation([(6, 1)], 1.0), totals={"chosen_nodes=6": 1}),
    ]
    assert structure_statistics(made) == {"expected_tau": pytest.approx(5 / 3)}
    assert chosen_sizes(made) == {
        "nodes": {"mode": "6", "share": pytest.approx(2 / 3), "mean": pytest.approx(16 / 3)},
        "widths": {"mode": "[2,1]", "share": 1.0},
    }


def test_a_graph_is_related_to_the_chain_of_its_source() -> None:
    def report(source: str, kind: str, drafted: float, **structure: float) -> dict:
        settings = {"source": source, "structure": {"kind": kind}}
        return {"settings": settings, "drafted_tokens_per_round": drafted, "structure": dict(structure)}

    reports = [
        report("small_lm", "token_graph", 30.0, drafted_by_source=12.0),
        report("small_lm", "chain", 8.0),
        report("early_exit", "token_graph", 30.0, drafted_by_source=12.0),
    ]
    relate_to_chain(reports)
    assert reports[0]["structure"]["drafted_vs_chain"] == 1.5
    assert "drafted_vs_chain" not in reports[2]["structure"]


def test_command_refuses_bad_input(checkpoint: Path, command: Callable) -> None:
    """Each says what is wrong, exits with 2 and leaves no report behind."""
    other = save_target(checkpoint / "other", seed=5)
    (checkpoint / "broken.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    (checkpoint / "long.jsonl").write_text(json.dumps({"prompt": "x" * 300}))
    (checkpoint / "file").write_text("")
    shutil.copytree(checkpoint / "drafter", checkpoint / "moved", dirs_exist_ok=True)
    meta = json.loads((checkpoint / "moved/drafter.json").read_text())
    meta["fingerprint"]["target"] = "runs/demo/target"  # as it was given where the drafter was trained
    (checkpoint / "moved/drafter.json").write_text(json.dumps(meta))
    bad = {
        ("checkpoint=nowhere",): "no drafter.json there",
        ("checkpoint=drafter", f"target={other}"): "was trained for another target",
        ("checkpoint=drafter", "target=gone/for/good"): "no such directory",
        ("checkpoint=moved",): "checkpoint=moved was trained for it: give target=",
        ("checkpoint=drafter", "prompt_text=[hi]", "max_new_tokens=256"): "max_new_tokens=256: expected less than",
        ("checkpoint=drafter", "prompts=broken.jsonl"): "broken.jsonl",
        ("checkpoint=drafter", "prompts=long.jsonl"): "300 tokens, expected 1 to 244",
        ("checkpoint=drafter", "prompts=none.jsonl"): "none.jsonl",
        ("checkpoint=drafter", "prompt_text=[hi]", "out_dir=file/out"): "out_dir=file/out: cannot be written",
        ("checkpoint=drafter", "method=eesd_cali"): "no calibration head there",
        ("checkpoint=drafter", "prompt_text=[hi]", "device=cuda:77"): "device=cuda:77: not usable here",
    }
    for overrides, message in bad.items():
        status, _, errors = command(*overrides)
        assert status == 2, (overrides, errors)
        assert errors.startswith("error: ")
        assert message in errors
    assert not (checkpoint / "runs/evaluate/report.json").exists()


def test_other_tokens_than_the_targets_end_with_status_1(
    checkpoint: Path, command: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime that once emits something else is caught; the report is written and says so."""
    right = verify_greedy

    def wrong(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> tuple[list[int], int]:
        accepted, bonus = right(tokens, parents, choices)
        return accepted, (bonus + 1) % 256

    monkeypatch.setattr("inference.choosing.verify_greedy", wrong)
    status, _, errors = command("checkpoint=drafter", "prompt_text=[some text]", "out_dir=wrong", "method=eesd_fixed")
    assert status == 1
    assert "not lossless: eesd_fixed" in errors
    report = json.loads((checkpoint / "wrong/report.json").read_text())
    assert report["lossless"]["identical"] == 0


def test_a_turn_beyond_the_drafters_own_context_is_left_out(checkpoint: Path, command: Callable) -> None:
    save_target(checkpoint / "short", "opt", max_position_embeddings=100)
    (checkpoint / "two_turns.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["so?", "and " * 20]}) + "\n")
    status, out, errors = command(
        "target=target", "small_lm=short", "method=vanilla", "prompts=two_turns.jsonl", "out_dir=two_turns"
    )
    assert status == 0, errors
    assert "skipped prompt=1 turn=2" in out + errors
    assert list(json.loads((checkpoint / "two_turns/report.json").read_text())["speedup_per_prompt"]) == ["1/turn1"]


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_are_held_out_as_training_held_them_out(checkpoint: Path, tmp_path: Path, mixed: bool) -> None:
    """Also where the library was one source of several: with another share training would have seen some of them."""
    trained_on = {
        "python_stdlib": DataConfig(heldout_fraction=0.01),
        "local": DataConfig(source="local", path="a.jsonl", heldout_fraction=0.01),
    }
    target = str(checkpoint / "target")
    fingerprint = fingerprint_target(open_target(target), load_config(target), load_tokenizer(target))
    drafter = make_drafter(checkpoint / "target", 1)
    for source, data in trained_on.items():
        if mixed:
            parts = {"open": MixPart(source=source, path=data.path), "own": MixPart(source="local", path="b.jsonl")}
            data = DataConfig(source="mix", mix=parts, heldout_fraction=0.01)
        save_pretrained(tmp_path / source, drafter, fingerprint, {"data": data.deciding()}, torch.float32)
        asked = EvaluateConfig(checkpoint=str(tmp_path / source), methods={"m": MethodConfig()})
        assert heldout_fraction(asked, 0.05) == (0.01 if source == "python_stdlib" else 0.05)


def test_end_tokens_and_ignoring_them(checkpoint: Path, command: Callable) -> None:
    """generation_config.json's list comes first, config.json's next, the tokenizer's last; text ends there."""
    target = checkpoint / "target"
    config, tokenizer = load_config(str(target)), load_tokenizer(str(target))
    generation = json.loads((target / "generation_config.json").read_text())
    assert end_tokens(str(target), None, config, tokenizer) == {tokenizer.eos_token_id}
    status, _, errors = command("checkpoint=drafter", "prompt_text=[some text]", "out_dir=free", "method=eesd_fixed")
    assert status == 0, errors
    tokens = json.loads((checkpoint / "free/generations.jsonl").read_text().splitlines()[0])["tokens"]
    (target / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [tokens[5], 9]}))
    try:
        assert end_tokens(str(target), None, config, tokenizer) == {tokens[5], 9}
        for option, expected in (("false", tokens[: tokens.index(tokens[5]) + 1]), ("true", tokens)):
            out_dir = f"ended_{option}"
            status, _, errors = command(
                "checkpoint=drafter", "prompt_text=[some text]", "method=eesd_fixed", f"ignore_eos={option}",
                f"out_dir={out_dir}",
            )  # fmt: skip
            assert status == 0, errors
            lines = (checkpoint / out_dir / "generations.jsonl").read_text().splitlines()
            assert all(json.loads(line)["tokens"] == expected for line in lines)
    finally:
        (target / "generation_config.json").write_text(json.dumps(generation))


def test_a_report_names_the_device_it_was_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert describe_machine("cuda:1")["device"] == "GPU 1"
    assert describe_machine()["device"] == "GPU None"  # the current one
    assert not describe_machine("cpu")["device"].startswith("GPU")

"""The command: from a checkpoint to a report, and what it refuses."""

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.commands import main_of
from outrider.commands.composing import add_methods
from outrider.data_prep.text.settings import DataConfig, MixPart
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.core.verify import verify_greedy
from outrider.inference.drafters.plugin import TrainingRecord
from outrider.inference.evaluate.planning import heldout_fraction
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS, MethodConfig
from tests.refusals import refusal
from tests.tiny import LAYERS, byte_tokenizer, save_exit, save_target


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    path = save_target(folder / "target")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    byte_tokenizer(template + "{% if add_generation_prompt %}assistant: {% endif %}").save_pretrained(path)
    save_exit(folder / "drafter", path, LAYERS - 1, noise=0.05)
    return folder


@pytest.fixture
def command(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable:
    """evaluate-checkpoint in this process: (exit status, stdout, stderr)."""
    monkeypatch.chdir(checkpoint)

    def run(*overrides: str, plots: bool = False) -> tuple[int, str, str]:
        if not plots:  # which take longer to draw than these models to decode
            monkeypatch.setattr("outrider.inference.report.plots._save", lambda *_: "")
        monkeypatch.setattr("sys.argv", ["evaluate-checkpoint", "max_new_tokens=12", "threads=1", *overrides])
        status = 0
        try:
            main_of("evaluate_checkpoint")()
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
        "checkpoint=drafter", "prompts=mt.jsonl", "method=[eesd_beta,eesd_fixed]", "out_dir=out", "card=true",
        plots=True,
    )  # fmt: skip
    assert status == 0, errors
    out = checkpoint / "out"
    reports = json.loads((out / "report.json").read_text())["reports"]
    assert [report["method"] for report in reports] == ["eesd_beta", "eesd_fixed"]
    for report in reports:
        assert report["lossless"] == {
            "reference": TRANSFORMERS, "checked": 4, "identical": 4, "excused_ties": 0, "identical_to_plain": 4,
                "autoregressive_identical": 4,
                "autoregressive_excused_ties": 0,
            "judged": {"autoregressive": None, report["method"]: None},  # in float32 equal texts are all that counts
        }  # fmt: skip
        assert report["tau"] > 1.5
        assert set(report["by_category"]) == {"writing", "math"}
        assert (report["prompts"], report["turns"], report["skipped"]) == (2, 4, [])
        assert report["threads"] == {"1": 2}  # of all prompts
    assert printed.splitlines()[-1] == "report: out/report.html"
    lines = [line for line in printed.splitlines() if line.startswith("result method=eesd_fixed ")]
    counts = [dict(word.split("=", 1) for word in shlex.split(line)[1:]) for line in lines]
    assert [(one["prompts"], one["same_text"]) for one in counts] == [("1", "2/2"), ("2", "4/4"), ("2", "4/4")]
    assert counts[0]["speedup"].endswith("×")
    assert counts[-1]["speedup"] == f"{reports[1]['speedup']['median']:.2f}×"  # of two prompts there is no interval
    table = (out / "report.md").read_text()
    assert table.strip() in printed
    assert [line.rsplit("|", 2)[1] for line in table.splitlines() if line.startswith("| eesd_beta | undecided |")] == [
        " 4/4 "
    ]
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


@pytest.mark.slow
def test_command_samples_when_told_to(checkpoint: Path, command: Callable) -> None:
    """Sampled arms have no tokens to compare; the same seed gives the same texts, another one others."""
    texts = []
    for number, seed in enumerate((0, 0, 1)):
        options = ("sampling.temperature=0.8", "sampling.top_k=50", f"seed={seed}", f"out_dir=sampled{number}")
        methods = ["method=[eesd_beta,mcsd]", "methods.mcsd.source=early_exit", "+method@methods.mcsd_naive=mcsd"]
        methods += ["methods.mcsd_naive.source=early_exit", "methods.mcsd_naive.structure.widths=[3,2]"]
        methods += ["methods.mcsd_naive.verify=naive"]
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


def test_every_drafter_given_has_a_method_where_none_is_chosen(tiny_models: Path) -> None:
    def chosen(*options: str) -> list[str]:
        found = add_methods(options)
        assert [option for option in found if option in options] == [*options]
        return [option for option in found if option not in options]

    assert chosen("target=t", "small_lm=d") == ["method=[small_lm/survival]"]
    assert chosen("target=t", "eagle3=h", "table=n", "small_lm=null") == ["method=[eagle3/survival,ngrams]"]
    assert chosen("target=t", "dtype=fast") == ["method=[prompt_lookup]"]
    for folder, preset in (("early_exit", "eesd_survival"), ("eagle3", "eagle3/survival"), ("table", "ngrams")):
        assert chosen(f"checkpoint={tiny_models / folder}", "target=t") == [f"method=[{preset}]"]
    assert chosen("checkpoint=nowhere", "table=n") == ["method=[eesd_survival,ngrams]"]
    assert chosen("target=t", "small_lm=d", "methods.small_lm_survival.copy=null") == ["method=[small_lm/survival]"]
    for said in ("method=aded", "method=[a,b]", "experiment=mine"):
        assert chosen("target=t", "small_lm=d", said) == []
    assert chosen("prompts=p", "debug=true") == ["method=[prompt_lookup]"]  # which lacks a target, and is told so
    assert chosen("target=t", "+drafters.mine=d") == []
    assert add_methods(["small_lm=d", "table=n"], fixed=True)[-1] == "method=[small_lm/fixed,ngrams]"
    assert add_methods(["target=t", "--cfg", "job"]) == ["target=t", "method=[prompt_lookup]", "--cfg", "job"]


@pytest.mark.slow
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
        ("checkpoint=nowhere",): "checkpoint=nowhere: no such directory",
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

    monkeypatch.setattr("outrider.inference.core.token_selector.verify_greedy", wrong)
    status, _, errors = command("checkpoint=drafter", "prompt_text=[some text]", "out_dir=wrong", "method=eesd_fixed")
    assert status == 1
    assert "not lossless: eesd_fixed" in errors
    report = json.loads((checkpoint / "wrong/report.json").read_text())
    assert report["lossless"]["identical"] == 0


@pytest.mark.slow
def test_a_turn_beyond_the_drafters_own_context_is_left_out(checkpoint: Path, command: Callable) -> None:
    save_target(checkpoint / "short", "opt", max_position_embeddings=100)
    (checkpoint / "two_turns.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["so?", "and " * 20]}) + "\n")
    status, out, errors = command(
        "target=target", "small_lm=short", "method=vanilla", "prompts=two_turns.jsonl", "out_dir=two_turns"
    )
    assert status == 0, errors
    assert "skipped prompt=1 turn=2" in out + errors
    report = json.loads((checkpoint / "two_turns/report.json").read_text())
    assert list(report["speedup_per_prompt"]) == ["1/turn1"]
    [left_out] = report["skipped"]
    assert left_out["prompt_id"] == "1/turn2"
    assert left_out["reason"].endswith("tokens and 12 new ones in a context of 100")
    assert f"Left out: 1/turn2 ({left_out['reason']})." in (checkpoint / "two_turns/report.md").read_text()


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_are_held_out_as_training_held_them_out(checkpoint: Path, tmp_path: Path, mixed: bool) -> None:
    """Also where the library was one source of several: with another share training would have seen some of them."""
    trained_on = {
        "python_stdlib": DataConfig(heldout_fraction=0.01),
        "local": DataConfig(source="local", path="a.jsonl", heldout_fraction=0.01),
    }
    target = checkpoint / "target"
    for source, data in trained_on.items():
        if mixed:
            parts = {"open": MixPart(source=source, path=data.path), "own": MixPart(source="local", path="b.jsonl")}
            data = DataConfig(source="mix", mix=parts, heldout_fraction=0.01)
        save_exit(tmp_path / source, target, 1, {"data": data.decisions()})
        asked = EvaluateConfig(checkpoint=str(tmp_path / source), methods={"m": MethodConfig()})
        assert heldout_fraction(asked) == (0.01 if source == "python_stdlib" else DataConfig.heldout_fraction)


def test_prompts_are_held_out_from_drafters_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"small_lm": 0.2, "ngrams": 0.01}
    records = {
        kind: TrainingRecord(data=DataConfig(heldout_fraction=share).decisions()) for kind, share in shares.items()
    }
    monkeypatch.setattr(EvaluateConfig, "paths", {"small_lm": "s", "ngrams": "n"})
    monkeypatch.setattr(EvaluateConfig, "training_records", lambda _: records)
    config = EvaluateConfig(target="t", methods={"m": MethodConfig("prompt_lookup")})
    assert heldout_fraction(config) == 0.01
    records["ngrams"] = TrainingRecord(data=DataConfig(heldout_fraction=0).decisions())
    refusal("prompts=python_stdlib: table=n has learned from all of them", heldout_fraction, config)
    for other in (replace(config, prompts="mt_bench"), replace(config, prompt_text=["def f("])):
        assert heldout_fraction(other) == DataConfig.heldout_fraction


@pytest.mark.slow
def test_end_tokens_and_ignoring_them(checkpoint: Path, command: Callable) -> None:
    """generation_config.json's list comes first, config.json's next, the tokenizer's last; text ends there."""
    target = checkpoint / "target"
    opened = open_target(str(target))
    generation = json.loads((target / "generation_config.json").read_text())
    assert end_tokens(opened) == {opened.tokenizer.eos_token_id}
    status, _, errors = command("checkpoint=drafter", "prompt_text=[some text]", "out_dir=free", "method=eesd_fixed")
    assert status == 0, errors
    tokens = json.loads((checkpoint / "free/generations.jsonl").read_text().splitlines()[0])["tokens"]
    (target / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [tokens[5], 9]}))
    try:
        assert end_tokens(opened) == {tokens[5], 9}
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

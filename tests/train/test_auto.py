"""`outrider auto`: what it chooses by what it measured, its steps, and a run of a tiny target from start to end."""

import json
import shlex
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from outrider.base.errors import UserError
from outrider.base.settings import construct
from outrider.commands import config_for
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.targets.fingerprint import Fingerprint
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.loading.memory_plan import Memory, evaluation_memory, evaluation_plan
from outrider.inference.report.sentences import write_recommendation
from outrider.inference.report.types import read_reports
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from outrider.train import auto_run
from outrider.train.auto import make_drafter
from outrider.train.auto_choice import (
    LEAST_MINUTES,
    NO_CHOICE,
    Choice,
    FirstAnswers,
    choose_corpus_share,
    choose_rows,
    choose_trainings,
    configure_pipeline,
)
from outrider.train.auto_run import run_auto
from outrider.train.pipeline_run import plan_steps
from outrider.train.settings.auto import TRAINABLE, AutoConfig
from tests.conf.test_configs import compose_and_build
from tests.gguf_files import save_plain_target, write_gguf
from tests.refusals import refusal
from tests.train.test_pipeline import printed_by
from tests.train.test_pipeline_options import settings_of

LOOK = FirstAnswers("cpu", 40, tokens_per_second=700.0, answer_tokens=140.0, prompts=40_000, loading=0.2, spent=1.0)
CONFIG = AutoConfig(target="org/model", minutes=60.0)
WITH_CORPUS = replace(CONFIG, corpus=("texts.jsonl",))
configure = partial(configure_pipeline, config_for=config_for)


def test_what_is_trained_follows_from_what_was_measured() -> None:
    """By tokens of answers that can be had, and by minutes; each kind that is not trained has a reason."""
    assert choose_trainings(CONFIG, LOOK, {}).kinds == ("early_exit", "small_lm")
    assert choose_trainings(CONFIG, replace(LOOK, device="cuda"), {}).kinds == ("eagle3", "early_exit", "small_lm")
    slow = choose_trainings(CONFIG, replace(LOOK, tokens_per_second=50.0), {})
    few = choose_trainings(CONFIG, replace(LOOK, prompts=400), {})
    short = choose_trainings(replace(CONFIG, minutes=15.0), LOOK, {})
    assert slow.kinds == few.kinds == short.kinds == ()
    assert "minutes" in slow.not_tried["early_exit"]
    assert "more minutes" in few.not_tried["small_lm"]
    assert choose_trainings(CONFIG, LOOK, {"early_exit": "no layers"}).kinds == ("small_lm",)
    for choice in (slow, few, short, choose_trainings(CONFIG, LOOK, {})):
        assert {*choice.kinds, *choice.not_tried} == {*TRAINABLE}


def test_a_drafter_that_was_trained_for_the_target_is_measured_instead_of_another_training(tmp_path: Path) -> None:
    """It is known by the target's fingerprint; one of another target, or of another tokenizer, is not."""
    shipped = auto_run.DRAFTERS / "smollm2"
    target = construct(Fingerprint, json.loads((shipped / "eesd/drafter.json").read_text())["fingerprint"])
    finished = auto_run.find_finished(replace(target, target="elsewhere"), auto_run.DRAFTERS)
    assert finished == {"early_exit": str(shipped / "eesd"), "small_lm": str(shipped / "small_lm")}
    assert auto_run.find_finished(replace(target, weights="of a fine-tune"), auto_run.DRAFTERS) == {}
    assert auto_run.find_finished(target, tmp_path) == {}
    choice = choose_trainings(CONFIG, LOOK, {}, {"small_lm": finished["small_lm"]})
    assert choice.kinds == ("early_exit",)
    assert "train=[small_lm]" in choice.not_tried["small_lm"]
    report = configure(CONFIG, choice, LOOK).steps["report"]
    assert report["small_lm"] == finished["small_lm"]
    assert {*TRAINABLE["small_lm"].methods} <= {*report["method"]}
    chosen = choose_trainings(replace(CONFIG, train=("small_lm",)), LOOK, {}, finished)
    assert (chosen.kinds, chosen.finished) == (("small_lm",), {})


def test_a_finished_drafter_is_served_and_exported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto_run, "_describe_report", lambda *given: [f"serve {path}" for path in given[-1]])
    monkeypatch.setattr(auto_run, "_export", lambda *given: f"export {given[2]} of {given[3]}")
    auto_run._conclude(CONFIG, tmp_path, [], {"early_exit": "shipped/eesd"}, lambda script, words: None)
    assert capsys.readouterr().out.startswith("serve shipped/eesd\nexport eesd of shipped/eesd\n")


def test_the_minutes_that_a_reason_names_are_enough() -> None:
    for rate in (50.0, 300.0, 2000.0):
        look = replace(LOOK, tokens_per_second=rate)
        why = choose_trainings(replace(CONFIG, minutes=10.0), look, {}).not_tried["early_exit"]
        minutes = float(why.partition("about ")[2].partition(" minutes")[0])
        assert "early_exit" in choose_trainings(replace(CONFIG, minutes=minutes + 1), look, {}).kinds
        assert "early_exit" not in choose_trainings(replace(CONFIG, minutes=0.9 * minutes), look, {}).kinds


def test_a_user_has_the_last_word() -> None:
    slow = replace(LOOK, tokens_per_second=5.0)
    assert choose_trainings(replace(CONFIG, train=("eagle3",)), slow, {}).kinds == ("eagle3",)
    assert choose_trainings(replace(CONFIG, train=()), LOOK, {}).kinds == ()
    refusal("each kind once", AutoConfig, target="org/model", train=("eagle3", "eagle3"))


@pytest.mark.parametrize("config", [CONFIG, WITH_CORPUS])
def test_all_minutes_are_given_out(config: AutoConfig) -> None:
    """To steps with a limit, to loading, to the look (the answers go on with its time) and to reading a corpus."""
    slow = replace(LOOK, tokens_per_second=50.0, tokenising_minutes=1.0)
    for look in (LOOK, replace(LOOK, device="cuda", answered=150), slow):
        choice = choose_trainings(config, look, {})
        loads = 2 + len(choice.kinds)
        before = look.spent - look.answered * look.answer_tokens / look.tokens_per_minute + loads * look.loading + 1.5
        before += look.tokenising_minutes * (1 + ("small_lm" in choice.kinds))
        assert sum(choice.minutes.values()) + before == pytest.approx(CONFIG.minutes)
        trained = [choice.minutes[TRAINABLE[kind].step] for kind in choice.kinds]
        if "corpus_lm" in choice.minutes:
            assert choice.minutes["corpus_lm"] == choice.minutes["small_lm"]
            trained[choice.kinds.index("small_lm")] *= 2
        assert all(minutes >= 0.9 * LEAST_MINUTES[look.device] for minutes in trained)
    refusal(
        r"minutes='4': expected 5 or more: loading takes 2\.9", choose_trainings, replace(CONFIG, minutes=4.0), LOOK, {}
    )


def test_a_share_is_held_out_of_the_answers_that_the_minutes_give() -> None:
    slow = replace(LOOK, tokens_per_second=6.0, prompts=2000)
    config = replace(CONFIG, minutes=90.0, train=("small_lm",))
    choice = choose_trainings(config, slow, {})
    answered = choice.minutes["responses"] * slow.tokens_per_minute / slow.answer_tokens
    share = configure(config, choice, slow).steps["small_lm"]["data.heldout_fraction"]
    assert share == pytest.approx(min(0.5, 8 / answered), rel=0.01)
    assert 0.05 < share < 0.5


def test_a_server_answers_held_out_prompts_within_the_minutes() -> None:
    config = AutoConfig(server="http://localhost:1", tokenizer="org/model", prompts="p.jsonl", minutes=60.0)
    pipeline = configure(config, choose_trainings(config, LOOK, {}), LOOK)
    assert 0 < pipeline.steps["heldout"]["minutes"] < pipeline.steps["responses"]["minutes"]


def test_of_few_answers_enough_are_held_out() -> None:
    """And a measured text takes half of a short context at most."""
    shares = {}
    for prompts in (10, 40, 4000):
        look = replace(LOOK, prompts=prompts, context=120)
        pipeline = configure(replace(CONFIG, train=tuple(TRAINABLE)), Choice(tuple(TRAINABLE), {}, {}), look)
        shares[prompts] = pipeline.steps["eesd"].get("data.heldout_fraction")
        assert pipeline.steps["report"]["max_new_tokens"] == 60
    assert shares == {10: 0.5, 40: 0.2, 4000: None}


@pytest.mark.parametrize(
    ("device", "kinds"), [("cpu", ()), ("cuda", ("early_exit",)), ("cpu", ("small_lm", "eagle3")), ("cuda", TRAINABLE)]
)
def test_every_step_is_what_its_command_takes(device: str, kinds: tuple[str, ...]) -> None:
    """With the minutes chosen, own prompts and a template, and without the steps of what is not trained."""
    config = replace(CONFIG, prompts="p.jsonl", template="vicuna", train=tuple(kinds))
    look = replace(LOOK, device=device)
    choice = choose_trainings(config, look, {})
    pipeline = configure(config, choice, look)
    made = {"eesd", "small_lm", "eagle3"} & {*pipeline.to_do}
    assert made == {"eesd" if kind == "early_exit" else kind for kind in kinds}
    built = settings_of(pipeline)
    for step, minutes in choice.minutes.items():
        assert built[step].minutes == pytest.approx(minutes, rel=0.01)
    assert {one.data.template for one in built.values() if hasattr(one, "data")} == {"vicuna"}
    assert built["report"].template == "vicuna"
    sources = {method.source for method in built["report"].methods.values()}
    assert sources == {*kinds, "ngrams", "prompt_lookup"}
    assert pipeline.steps["prompts"] == {"file": "p.jsonl"}
    step = settings_of(configure(replace(config, prompts=None), choice, look))["prompts"]
    assert (step.target, step.template, step.minutes) == ("org/model", "vicuna", 7.2)
    assert "minutes" not in pipeline.steps["trigrams"]


def test_a_small_lm_that_read_a_corpus_needs_fewer_answers() -> None:
    """Other kinds, which do not read it, need as many as before."""
    slow = replace(LOOK, tokens_per_second=50.0, prompts=500)
    assert choose_trainings(CONFIG, slow, {}).kinds == ()
    choice = choose_trainings(WITH_CORPUS, slow, {})
    assert choice.kinds == ("small_lm",)
    assert "from 300,000" in choice.not_tried["early_exit"]
    fewer = choose_trainings(WITH_CORPUS, replace(slow, prompts=300), {})
    assert "from 60,000" in fewer.not_tried["small_lm"]


def test_a_corpus_of_one_text_is_refused_before_anything_runs(
    tmp_path: Path, chat_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("once upon a time " * 100)
    config = AutoConfig(
        target=chat_target, prompts=str(own_prompts(tmp_path, 20)), corpus=("book.txt",), train=("small_lm",)
    )
    refusal(r"corpus=book\.txt: no text of it is in the (train|heldout) split", run_auto, config, config_for)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("runs")] == []


@pytest.mark.parametrize(("parameters", "hidden"), [(0.0, 384), (1.35e8, 256), (1.5e9, 384)])
def test_the_corpus_is_read_before_the_answers(parameters: float, hidden: int) -> None:
    """By a table, to which that of the answers is added, and by the small LM, which answers continue: its shape is one
    for larger targets, and its distribution the text's own."""
    look = replace(LOOK, prompts=40, parameters=parameters)
    pipeline = configure(replace(WITH_CORPUS, train=("small_lm",)), Choice(("small_lm",), {}, {}), look)
    built = settings_of(pipeline)
    assert built["corpus_table"].data.path == built["corpus_lm"].data.path == ("texts.jsonl",)
    assert built["trigrams"].merge == ("o/corpus_table",)
    assert built["trigrams"].orders == built["corpus_table"].orders
    first, then = built["corpus_lm"], built["small_lm"]
    assert (first.target, first.tokenizer, first.objective) == (None, "org/model", "cross_entropy")
    assert (first.drafter.hidden, first.drafter.path) == (hidden, None)
    assert (first.data.share, then.data.share) == (1.0, 1.0)
    assert (then.drafter.path, then.draft_vocabulary) == ("o/corpus_lm", None)
    assert (then.teacher, then.objective) == ("cached", "forward_kl")
    assert then.data.heldout_fraction == 0.2 > first.data.heldout_fraction
    inputs = {step.name: {*step.inputs} for step in plan_steps(pipeline, config_for)}
    assert inputs["small_lm"] == {"corpus_lm", "responses"}
    assert inputs["trigrams"] == {"corpus_table", "responses"}
    assert configure(WITH_CORPUS, NO_CHOICE, look).steps.keys() & {"corpus_lm", "corpus_table"} == {"corpus_table"}


def test_a_small_lm_reads_what_its_minutes_hold(tmp_path: Path) -> None:
    """Of few texts all, since each split needs some; both splits of a share are parts of those of the whole."""
    assert choose_corpus_share(replace(CONFIG, minutes=60.0), "cpu", 2e9) == 0.026
    assert choose_corpus_share(replace(CONFIG, minutes=60.0), "cpu", 2e6) == 1.0
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"text number {number}"}) + "\n" for number in range(2000)))
    assert auto_run._share_of_corpus([str(file)], 0.3) == 0.3
    assert 0.05 < auto_run._share_of_corpus([str(file)], 0.001) < 0.5  # of which eight texts are held out
    whole, part = (DataConfig(source="local", path=str(file), share=share) for share in (1.0, 0.3))
    for split, least in (("train", 400), ("heldout", 15)):
        texts = [{record["text"] for record in read_records(data, split)} for data in (whole, part)]
        assert least < len(texts[1]) < len(texts[0]) / 2
        assert texts[1] < texts[0]
    look = replace(LOOK, prompts=40, corpus_share=0.3)
    built = settings_of(configure(replace(WITH_CORPUS, train=("small_lm",)), Choice(("small_lm",), {}, {}), look))
    assert (built["corpus_lm"].data.share, built["corpus_table"].data.share) == (0.3, 1.0)


def test_the_printed_commands_render_conversations_as_auto_did(tmp_path: Path) -> None:
    config = replace(CONFIG, template="tokenizer", chat_template_kwargs={"enable_thinking": False})
    [line] = auto_run._describe_forecast(config, tmp_path, ["small_lm", "trigrams"])
    built = compose_and_build("forecast", shlex.split(line.partition("outrider forecast ")[2]))
    assert (built.kinds, built.minutes, built.template) == (("small_lm",), config.minutes, "tokenizer")
    assert built.chat_template_kwargs == config.chat_template_kwargs
    assert auto_run._describe_forecast(config, tmp_path, ["trigrams"]) == []


def test_measured_texts_are_as_long_as_answers() -> None:
    for tokens, length in ((10.0, 64), (140.0, 140), (900.0, 256)):
        pipeline = configure(CONFIG, NO_CHOICE, replace(LOOK, answer_tokens=tokens))
        assert pipeline.steps["report"]["max_new_tokens"] == length


def test_folders_are_named_after_targets() -> None:
    assert AutoConfig(target="org/model").out_dir == "runs/auto/model"
    assert AutoConfig(target="/a/b.gguf").out_dir == "runs/auto/b"
    assert AutoConfig(target="x", out_dir="here").out_dir == "here"


def own_prompts(folder: Path, count: int = 30) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"What is {i}?"]}) + "\n" for i in range(count)))
    return path


@pytest.mark.slow
def test_from_a_target_to_a_recommendation(tmp_path: Path, chat_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, its resumption, and what it refuses to do twice."""
    monkeypatch.chdir(tmp_path)
    config = AutoConfig(target=chat_target, prompts=str(own_prompts(tmp_path)), minutes=8.0, out_dir="out")
    said = printed_by(lambda: run_auto(config, config_for))
    folder = tmp_path / "out"
    sentence = write_recommendation(read_reports(folder / "report/report.json", ""))
    for words in ("not tried: early_exit: all prompts make", "give more prompts", sentence):
        assert words in said
    assert sentence in (folder / "README.md").read_text()
    assert (folder / "export/trigrams/README.md").exists()
    assert f"talk to it: outrider serve target={chat_target} checkpoint=out/trigrams dtype=fast" in said  # as measured
    (longer,) = [line for line in said.splitlines() if line.startswith("measure longer texts: ")]
    built = compose_and_build("evaluate_checkpoint", shlex.split(longer.partition("evaluate-checkpoint ")[2]))
    assert (built.max_new_tokens, built.num_prompts, built.minutes) == (256, None, None)
    assert Path(built.prompts).exists()
    held = {prompt.turns for prompt in read_prompts(str(folder / "prompts/heldout.jsonl"))}
    answered = {prompt.turns for prompt in read_prompts(str(folder / "prompts/train.jsonl"))}
    assert (len(held), len(answered), len(held | answered)) == (12, 18, 30)
    refusal(r"holds an earlier run \(auto\.json\); resume=true continues it", run_auto, config, config_for)
    refusal(r"minutes=9\.0 \(was 8\.0\)", run_auto, replace(config, minutes=9.0, resume=True), config_for)
    again = printed_by(lambda: run_auto(replace(config, resume=True), config_for))
    assert (again.count("state=done-before"), sentence in again) == (4, True)


@pytest.mark.parametrize(("answered", "prompts", "rows"), [(3, 30, 3), (25, 30, 25), (28, 30, 25), (3, 3, 25)])
def test_after_a_slow_look_fewer_prompts_are_answered_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: int, prompts: int, rows: int
) -> None:
    """A batch that was too slow for the look was made smaller."""
    counts = {"tokens": 90, "responses": answered, "prompts": prompts}
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses/summary.json").write_text(json.dumps(counts))
    (tmp_path / "responses/seconds.json").write_text('{"seconds": 9.0}')
    monkeypatch.setattr("outrider.train.steps.run_command", lambda *_: 0)
    config = AutoConfig(target="t", prompts=str(own_prompts(tmp_path)), out_dir=str(tmp_path))
    look = auto_run._time_answers(config, replace(LOOK, rows=25), time.monotonic(), config_for)
    assert (look.rows, look.answered, look.tokens_per_second) == (rows, answered, 10.0)


def test_a_plan_makes_nothing(
    tmp_path: Path, chat_target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_drafter(AutoConfig(target=chat_target, plan=True))
    said = capsys.readouterr().out
    assert "memory_gb=" in said
    assert "early_exit, small_lm" in said
    assert not any(tmp_path.iterdir())


def test_a_target_that_does_not_fit_is_refused(chat_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.train.auto_run.evaluation_memory", lambda *_: [Memory("weights", 10**15)])
    with pytest.raises(UserError, match=r"decoding it takes memory_gb=1000000\.0 of"):
        run_auto(AutoConfig(target=chat_target, plan=True), config_for)


def test_a_quantised_file_takes_three_times_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU multiplies its weights as they are stored, and `auto` measures short texts."""
    source = save_plain_target(tmp_path / "target")
    files = [write_gguf(source, tmp_path / f"{kind}.gguf", kind) for kind in ("Q4_K", "F32")]
    config = EvaluateConfig(target="t", methods={"m": MethodConfig("prompt_lookup")})
    weights = [evaluation_memory(config, open_target(str(path)), 64)[0].size for path in (*files, source)]
    assert weights[0] == 3 * files[0].stat().st_size
    assert weights[1] == weights[2]
    assert evaluation_plan(config, open_target(str(files[0]))).parts[0].size == weights[0]
    asked = []
    monkeypatch.setattr(auto_run, "evaluation_memory", lambda *given: asked.append(given[2:]) or [])
    auto_run._describe_memory(open_target(str(source)), 1e12)
    assert asked == [(1024,)]


def test_inputs_that_a_later_step_cannot_use_stop_it_first(
    tmp_path: Path, tiny_models: Path, chat_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig(target=str(tiny_models / "target"), plan=True, out_dir=str(tmp_path / "out"))
    monkeypatch.setattr("outrider.draft_models.targets.open_target.why_not_by_layers", lambda _: "no layers")
    with pytest.raises(UserError, match=r"train='early_exit': expected another kind: .*no layers"):
        run_auto(replace(config, target=chat_target, train=("early_exit",)), config_for)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own", [True, False])
def test_a_rehearsal_has_a_users_own_prompts_or_few(tmp_path: Path, own: bool) -> None:
    prompts = str(own_prompts(tmp_path)) if own else None
    pipeline = configure(replace(CONFIG, prompts=prompts, debug=True), NO_CHOICE, LOOK)
    assert (pipeline.resume, configure(CONFIG, NO_CHOICE, LOOK).resume) == (False, True)
    step = settings_of(pipeline)["prompts"]
    assert (step.file, step.target, step.count < 100) == (prompts, None if own else "org/model", not own)


def test_a_batch_fits_the_memory_and_the_minutes() -> None:
    """As many prompts as there is room for twice over; of larger targets fewer on a CPU, whose steps take longer."""
    assert choose_rows("cpu", 1.35e8, 1e6, 1e12) == 40
    assert choose_rows("cpu", 1.5e9, 1e6, 1e12) == 33
    assert choose_rows("cpu", 7e9, 1e6, 1e12) == 8
    assert choose_rows("cuda", 7e9, 1e6, 1e12) == 256
    assert choose_rows("cuda", 7e9, 0.5e9, 60e9) == 60
    assert choose_rows("cuda", 7e9, 0.5e9, 0.1e9) == 1

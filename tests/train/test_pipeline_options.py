"""What every experiment of the pipeline asks of its steps: options that their commands take, minutes, targets."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.base.files import read_json
from outrider.commands import config_for
from outrider.train.pipeline_run import plan_steps
from outrider.train.settings.pipeline import STEPS, PipelineConfig
from outrider.train.steps import write_words
from tests.conf.test_configs import GROUPS
from tests.refusals import refusal
from tests.tiers import quick_where, typical_where

ROOT = Path(__file__).parents[2]
PAPERS = {  # experiments about targets of the papers: the target, and the steps that they leave out
    "vicuna_7b": ("lmsys/vicuna-7b-v1.3", set()),
    "llama2_13b": ("meta-llama/Llama-2-13b-hf", {"small_lm"}),
    "opt_13b": ("facebook/opt-13b", {"eesd", "calibrate"}),
}
OF_CORPUS = {"corpus_lm", "corpus_table"}  # steps that only `outrider auto corpus=` adds
FETCHED = {
    "smollm2_demo": {"fetch", "prompts", "report"},
    "smollm2_drafters": {*STEPS} - {"target", "eagle3", "trigrams", "heldout", *OF_CORPUS},
}
EXPERIMENTS = ("demo", *PAPERS, *FETCHED)


def pipeline(words: Sequence[str]) -> PipelineConfig:
    """The pipeline of a command line."""
    config: PipelineConfig = config_for("train/pipeline.py", words)
    return config


def settings_of(config: PipelineConfig) -> dict[str, Any]:
    """What each step runs with in the directory o; its inputs need not be there."""
    return {step.name: step.settings for step in plan_steps(replace(config, out_dir="o"), config_for)}


def steps_of(experiment: str) -> set[str]:
    return (
        FETCHED.get(experiment)
        or set(STEPS) - {"eagle3", "fetch", "prompts", "heldout", *OF_CORPUS} - PAPERS.get(experiment, ("", set()))[1]
    )


def test_the_clones_drafters_are_made_as_their_records_say() -> None:
    """The options that their trainings ran with, but for the data's place."""
    settings = settings_of(pipeline(["experiment=smollm2_drafters"]))
    for step, file, part in (("small_lm", "finetune_drafter.json", "settings"), ("eesd", "drafter.json", "training")):
        record = read_json(ROOT / "drafters/smollm2" / step / file, "record", "")[part]
        today = asdict(settings[step])
        for before, after, changed in (
            (record, today, {"fit", "data", "target"}), (record["fit"], today["fit"], {"betas", "wandb"})
        ):  # fmt: skip
            assert len(keys := before.keys() & after.keys() - changed) >= 10
            assert {key: after[key] for key in keys} == {key: before[key] for key in keys}


WITH_REHEARSALS = [(name, debug) for name in EXPERIMENTS for debug in (False, True)]


@pytest.mark.parametrize(
    ("name", "debug"),
    typical_where(
        lambda case: not case[1] or case[0] in ("demo", "vicuna_7b", "smollm2_drafters"),
        quick_where(lambda case: case[0] == "demo", WITH_REHEARSALS),
    ),
)
def test_every_step_is_what_its_command_takes(name: str, debug: bool) -> None:
    """In a rehearsal without a network, in the directory of the rehearsal."""
    config = pipeline([f"experiment={name}", f"debug={str(debug).lower()}"])
    assert set(config.to_do) == (steps_of(name) - {"target"} if name in PAPERS and not debug else steps_of(name))
    assert debug or config.out_dir == f"runs/{name}"
    folder = "o-debug" if debug else "o"
    for step, settings in settings_of(config).items():
        assert (settings.out_dir, settings.resume) == (f"{folder}/{step}", True)
        if hasattr(settings, "data") and (debug or name not in PAPERS):
            sources = [part for _, _, part in settings.data.parts()] or [settings.data]
            assert {part.source for part in sources} <= {"python_stdlib", "local"}  # no network
            own = any(part.path and part.path[0].startswith(folder) for part in sources)  # which have long rows
            assert not debug or own or step == "responses" or getattr(settings, "seq_len", 64) == 64
        if hasattr(settings, "fit"):
            assert settings.fit.wandb.mode == "disabled"
            assert not debug or (settings.data.cache_dir, settings.fit.steps) == (f"{folder}/cache", 2)
        models = (getattr(settings, option, None) for option in ("small_lm", "checkpoint", "table", "eagle3"))
        assert not debug or all(Path(model).is_relative_to(folder) for model in models if model is not None)


def minutes_of(config: PipelineConfig) -> float:
    """What all steps together are given."""
    return sum(settings.minutes or 0.0 for settings in settings_of(config).values() if hasattr(settings, "minutes"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_whole_takes_the_minutes_that_are_there(name: str) -> None:
    """The steps get more or less, all in proportion, and what is asked of a step itself counts."""
    plain = pipeline([f"experiment={name}"])
    whole = sum(plain.expected_minutes[step] for step in plain.to_do)
    for minutes in (0.6 * whole, 2 * whole):
        config = replace(plain, minutes=minutes)
        assert sum(config.estimate_minutes(step) or 0.0 for step in config.to_do) == pytest.approx(minutes)
        assert minutes_of(config) == pytest.approx(minutes_of(plain) + minutes - whole, rel=0.02)
    by_user = pipeline([f"experiment={name}", f"minutes={whole}", "steps.report.minutes=99"])
    assert settings_of(by_user)["report"].minutes == 99


def test_minutes_that_cannot_be_kept_are_refused() -> None:
    loading = r"minutes=3\.0: expected more than the 3\.3 of loading, counting and saving"
    refusal(loading, pipeline, ["experiment=demo", "minutes=3"])
    refusal(r"expected null: how long eesd will take is not known", PipelineConfig, steps={"eesd": {}}, minutes=30.0)
    refusal("expected null with debug=true", pipeline, ["experiment=demo", "minutes=30", "debug=true"])


@pytest.mark.parametrize(("name", "most"), zip(EXPERIMENTS, (12, 185, 185, 185, 5, 20), strict=True))
def test_the_time_left_is_told_by_what_steps_are_expected_to_take(name: str, most: int) -> None:
    """Each step, none less than it has by its options; in all what README says."""
    config = pipeline([f"experiment={name}"])
    assert all(config.expected_minutes[step] >= config.scaled_minutes(step) for step in config.to_do)
    assert 0.5 * most <= sum(config.expected_minutes[step] for step in config.to_do) <= most


def test_the_demo_has_so_many_minutes_on_any_machine() -> None:
    """Whatever takes longer on a slower machine is limited: all but reading, counting and loading."""
    steps = settings_of(pipeline(["experiment=demo"]))
    del steps["trigrams"]
    for settings in steps.values():
        assert not hasattr(settings, "decode_prompts") or settings.fit.eval_every is None  # one evaluation, at the end
    assert sum(settings.minutes for settings in steps.values()) <= 8
    assert steps["target"].minutes == max(settings.minutes for settings in steps.values())


def test_a_step_reads_what_earlier_ones_leave_or_what_its_options_name() -> None:
    """What no step makes is no option, and a step is made again when what it reads was."""
    shipped = settings_of(pipeline(["experiment=smollm2_demo", "steps.report.small_lm=m"]))["report"]
    assert (shipped.target, shipped.prompts) == ("o/fetch", "o/prompts/heldout.jsonl")
    assert (shipped.small_lm, shipped.eagle3) == ("m", None)
    assert (shipped.checkpoint, shipped.table) == tuple(
        str(ROOT / "drafters/smollm2" / name) for name in ("eesd", "trigrams")
    )
    report, table = (settings_of(pipeline(["experiment=demo"]))[name] for name in ("report", "trigrams"))
    assert (report.checkpoint, report.small_lm, report.table) == ("o/eesd", "o/small_lm", "o/trigrams")
    assert table.tokenizer == "o/target"
    inputs = {step.name: {*step.inputs} for step in plan_steps(pipeline(["experiment=demo"]), config_for)}
    assert inputs["eesd"] == {"target", "responses"}
    assert inputs["calibrate"] == {"eesd"}  # whose directory gets the head
    assert inputs["report"] == {"target", "eesd", "calibrate", "small_lm", "trigrams"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_another_target_takes_the_place_of_the_step_that_would_make_one(name: str) -> None:
    config = pipeline([f"experiment={name}", "target=mine"])
    assert set(config.to_do) == steps_of(name) - {"target", "fetch"}
    readers = {step for step, settings in settings_of(config).items() if getattr(settings, "target", None) == "mine"}
    reading = {"responses", "eesd", "small_lm", "report"} | ({"prompts"} if name in FETCHED else set())
    assert readers == reading & steps_of(name)
    assert name in FETCHED or settings_of(config)["trigrams"].tokenizer == "mine"


def test_the_experiments_in_no_folder_are_the_pipelines() -> None:
    """auto.yaml is completed by `outrider auto`: tests/train/test_auto.py."""
    names = {*EXPERIMENTS, "auto"}
    assert {path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")} == set(GROUPS["experiment"]) == names
    left_out = {"target", "fetch", "calibrate", "heldout", *OF_CORPUS}
    assert {*settings_of(pipeline(["experiment=auto", "target=mine"]))} == {*STEPS} - left_out


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_s_experiment_is_bounded_and_about_its_target(name: str) -> None:
    """All that takes long has minutes, each training is watched by what it decodes, and data and prompts are named."""
    config = pipeline([f"experiment={name}"])
    assert config.target == PAPERS[name][0]
    steps = settings_of(config)
    for step, settings in steps.items():
        assert step == "trigrams" or settings.minutes > 0
        assert getattr(settings, "target", None) in (None, config.target)
    for step in {"eesd", "small_lm"} & {*steps}:
        assert steps[step].decode_prompts > 0
        assert steps[step].fit.eval_every is not None
    report, answers = steps["report"], ("o/responses/responses-*.jsonl",)
    assert report.prompts == {"vicuna_7b": "mt_bench", "llama2_13b": "gsm8k", "opt_13b": "alpaca"}[name]
    assert report.template == ("vicuna" if name == "vicuna_7b" else "none")
    assert steps["trigrams"].data.path == answers
    if "eesd" in steps:  # Table 9
        eesd = steps["eesd"]
        assert (eesd.objective, eesd.exit_layer, eesd.seq_len) == ("cross_entropy", 3, 2048)
        assert (eesd.fit.lr, eesd.fit.batch_rows, eesd.fit.epochs) == (1e-3, 64, 4)
        assert eesd.data.mix["generated"].path == answers
        assert {steps[step].data.template for step in ("responses", "calibrate")} == {
            "vicuna" if name == "vicuna_7b" else "tokenizer"
        }


def test_a_rehearsal_has_the_target_that_a_user_gives() -> None:
    """Otherwise a toy, not what the experiment is about, which would have to be downloaded."""
    for words, target in ((["target=mine"], "mine"), ([], None)):
        assert pipeline(["experiment=vicuna_7b", "debug=true", *words]).target == target
    assert settings_of(pipeline(["experiment=opt_13b", "~steps.small_lm"]))["report"].small_lm == "facebook/opt-125m"


def test_your_option_of_a_step_replaces_the_experiments() -> None:
    """Also one with dots, a group and a list; and it is taken back by ~."""
    words = ["eesd.data.mix.open.weight=0.5", "eesd.fit.lr=1e-3", "eesd.data@data.mix.open=python_packages"]
    words += ["trigrams.orders=[2]", "eagle3.fit.steps=9", "eagle3.fit.epochs=null"]
    removed = ["~steps.calibrate.fit.wandb.mode", "~steps.calibrate.prompts"]
    added = "+steps.eagle3={seq_len:64}"
    plain = {step.name: step for step in plan_steps(pipeline(["experiment=demo"]), config_for)}
    config = pipeline(["experiment=demo", added, *(f"steps.{word}" for word in words), *removed])
    steps = {step.name: step for step in plan_steps(config, config_for)}
    eesd, open_part = steps["eesd"].settings, steps["eesd"].settings.data.mix["open"]
    assert (eesd.fit.lr, open_part.weight, open_part.packages) == (0.001, 0.5, True)
    assert {*plain["eesd"].options} - {*steps["eesd"].options} == {
        "data.mix.open.weight=0.9", "data@data.mix.open=python_stdlib"
    }  # fmt: skip
    assert steps["trigrams"].settings.orders == (2,)
    assert {*plain["calibrate"].options} - {*steps["calibrate"].options} == {"fit.wandb.mode=disabled", "prompts=128"}
    assert (steps["eagle3"].settings.seq_len, steps["eagle3"].settings.fit.steps) == (64, 9)


def test_options_may_be_nested_and_keep_any_text() -> None:
    """As in the YAML of a command."""
    options = {"data": {"path": "x", "max_records": 3}, "orders": [2], "a": ["o'(/x", "t,1/y", "z"], "c": "o'(/y z"}
    assert write_words(options) == [
        "data.path=x", "data.max_records=3", "orders=[2]", r"a=['o\'(/x','t,1/y',z]", r"c='o\'(/y z'"
    ]  # fmt: skip

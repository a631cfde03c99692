"""What every experiment of the pipeline asks of its steps: options that their commands take, minutes, targets."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.base.errors import UserError
from outrider.base.files import read_json
from outrider.commands import config_for
from outrider.train.pipeline_run import job_of, jobs_of, words_of
from outrider.train.pipeline_settings import HERE, REPOSITORY, STEPS, PipelineConfig
from tests.conf.test_configs import GROUPS
from tests.refusals import refusal
from tests.tiers import quick_where

ROOT = Path(__file__).parents[2]
PAPERS = {  # experiments about targets of the papers: the target, and the steps that they leave out
    "vicuna_7b": ("lmsys/vicuna-7b-v1.3", set()),
    "llama2_13b": ("meta-llama/Llama-2-13b-hf", {"small_lm"}),
    "opt_13b": ("facebook/opt-13b", {"eesd", "calibrate"}),
}
TRAINED = {*STEPS} - {"target", "eagle3", "trigrams"}
FETCHED = {"smollm2_demo": {"fetch", "prompts", "report"}, "smollm2_drafters": TRAINED}
EXPERIMENTS = ("demo", *PAPERS, *FETCHED)


def pipeline(words: Sequence[str]) -> PipelineConfig:
    """The pipeline of a command line."""
    config: PipelineConfig = config_for("train/pipeline.py", words)
    return config


def settings_of(config: PipelineConfig) -> dict[str, Any]:
    """What each step runs with; its inputs need not be there."""
    placed = replace(config, out_dir="o")
    return {name: job_of(STEPS[name].script, placed.arguments(name), config_for).settings for name in config.to_do}


def steps_of(experiment: str) -> set[str]:
    return (
        FETCHED.get(experiment) or set(STEPS) - {"eagle3", "fetch", "prompts"} - PAPERS.get(experiment, ("", set()))[1]
    )


def test_the_clones_drafters_are_made_as_their_records_say() -> None:
    """The options that their trainings ran with, but for the data's place."""
    for step, file, part in (("small_lm", "finetune_drafter.json", "settings"), ("eesd", "drafter.json", "training")):
        said = read_json(ROOT / "drafters/smollm2" / step / file, "record", "")[part]
        now = asdict(settings_of(pipeline(["experiment=smollm2_drafters"]))[step])
        for mine, its, out in ((said, now, {"fit", "data", "target"}), (said["fit"], now["fit"], {"betas", "wandb"})):
            assert len(known := mine.keys() & its.keys() - out) >= 10
            assert {key: its[key] for key in known} == {key: mine[key] for key in known}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", quick_where(lambda name: name == "demo", EXPERIMENTS))
def test_every_step_is_what_its_command_takes(name: str, debug: bool) -> None:
    """In a rehearsal without a network, in the directory of the rehearsal."""
    config = pipeline([f"experiment={name}", f"debug={str(debug).lower()}"])
    assert set(config.to_do) == (steps_of(name) - {"target"} if name in PAPERS and not debug else steps_of(name))
    assert debug or config.out_dir == f"runs/{name}"
    here = f"{config.out_dir}-debug" if debug else "o"
    rehearsed = {step: job.settings for step, job in jobs_of(config, config_for).items()} if debug else None
    for step, built in (rehearsed or settings_of(config)).items():
        assert (built.out_dir, built.resume) == (f"{here}/{step}", True)
        if hasattr(built, "data") and (debug or name not in PAPERS):
            sources = [part.source for _, _, part in built.data.parts()] or [built.data.source]
            assert set(sources) <= {"python_stdlib", "local"}  # no network
        if hasattr(built, "fit"):
            assert built.fit.wandb.mode == "disabled"
        if debug:
            fitted = hasattr(built, "fit") and (built.data.cache_dir, built.fit.steps)
            assert fitted in (False, (f"{here}/cache", 2))
            given = (getattr(built, name, None) for name in ("small_lm", "checkpoint", "table", "eagle3"))
            assert all(Path(where).is_relative_to(here) for where in given if where is not None)


def minutes_of(config: PipelineConfig) -> float:
    """What all steps together are given."""
    return sum(config.options(name).get("minutes", 0.0) for name in config.to_do)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_whole_takes_the_minutes_that_are_there(name: str) -> None:
    """The steps get more or less, all in proportion, and what is asked of a step itself counts."""
    plain = pipeline([f"experiment={name}"])
    whole = sum(plain.expected_minutes[step] for step in plain.to_do)
    for minutes in (0.6 * whole, 2 * whole):
        config = pipeline([f"experiment={name}", f"minutes={minutes}"])
        assert sum(config.expected_minutes[step] for step in config.to_do) == pytest.approx(minutes)
        assert replace(config, debug=False).steps == config.steps  # which is not shared out again
        assert minutes_of(config) == pytest.approx(minutes_of(plain) + minutes - whole, rel=0.02)
        assert {**config.options("report"), "minutes": 0} == {**plain.options("report"), "minutes": 0}
    mine = pipeline([f"experiment={name}", f"minutes={whole}", "steps.report.minutes=99"])
    assert mine.options("report")["minutes"] == 99


def test_minutes_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(UserError, match=r"minutes=3\.0: expected more than the 3\.3 of loading, counting and saving"):
        pipeline(["experiment=demo", "minutes=3"])
    refusal(r"expected null: how long eesd will take is not known", PipelineConfig, steps={"eesd": {}}, minutes=30.0)
    refusal("expected null with debug=true", pipeline, ["experiment=demo", "minutes=30", "debug=true"])


@pytest.mark.parametrize(("name", "most"), zip(EXPERIMENTS, (12, 185, 185, 185, 5, 20), strict=True))
def test_the_time_left_is_told_by_what_steps_are_expected_to_take(name: str, most: int) -> None:
    """Each step, none less than it has by its options; in all what README says."""
    config = pipeline([f"experiment={name}"])
    for step in config.to_do:
        assert config.expected_minutes[step] >= config.options(step).get("minutes", 0.0)
    assert 0.5 * most <= sum(config.expected_minutes[step] for step in config.to_do) <= most


def test_the_demo_has_so_many_minutes_on_any_machine() -> None:
    """Whatever takes longer on a slower machine is limited: all but reading, counting and loading."""
    built = settings_of(pipeline(["experiment=demo"]))
    del built["trigrams"]
    for one in built.values():
        assert not hasattr(one, "decode_prompts") or one.fit.eval_every is None  # one evaluation, at the end
    assert sum(one.minutes for one in built.values()) <= 8
    assert built["target"].minutes == max(one.minutes for one in built.values())


def test_drafters_that_no_step_trains_are_given() -> None:
    """A link to what a step would leave is no option where the step is left out."""
    options = pipeline(["experiment=smollm2_demo"]).options("report")
    given = {key: value for key, value in options.items() if isinstance(value, str)}
    shipped = {"checkpoint": "eesd", "small_lm": "small_lm", "table": "trigrams"}
    places = {key: f"{REPOSITORY}/drafters/smollm2/{name}" for key, name in shipped.items()}
    asked = f"{HERE}/prompts/heldout.jsonl"
    assert given == {**places, "target": f"{HERE}/fetch", "prompts": asked, "dtype": "fast"}
    assert pipeline(["experiment=smollm2_demo", "steps.report.small_lm=m"]).options("report")["small_lm"] == "m"
    assert pipeline(["experiment=demo"]).options("report")["table"] == f"{HERE}/trigrams"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_another_target_takes_the_place_of_the_step_that_would_make_one(name: str) -> None:
    config = pipeline([f"experiment={name}", "target=mine"])
    assert set(config.to_do) == steps_of(name) - {"target", "fetch"}
    options = {step: config.options(step) for step in config.to_do}
    given = {step for step, one in options.items() if one.get("target") == "mine"}
    reading = {"responses", "eesd", "small_lm"} | ({"report"} if name != "demo" else set())
    assert given == reading & steps_of(name) | ({"prompts"} if name in FETCHED else set())  # others split a file
    assert options.get("trigrams", {}).get("tokenizer") == (None if name in FETCHED else "mine")
    assert "{target}" not in str(options)


def test_the_experiments_in_no_folder_are_the_pipelines() -> None:
    assert {path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")} == set(EXPERIMENTS)
    assert set(GROUPS["experiment"]) == set(EXPERIMENTS)


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_s_experiment_is_bounded_and_about_its_target(name: str) -> None:
    """All that takes long has minutes, each training is watched by what it decodes, and data and prompts are named."""
    config = pipeline([f"experiment={name}"])
    assert config.target == PAPERS[name][0]
    built = settings_of(config)
    for step, one in built.items():
        assert step == "trigrams" or one.minutes > 0
        assert getattr(one, "target", None) in (None, config.target)
    for step in {"eesd", "small_lm"} & {*built}:
        assert built[step].decode_prompts > 0
        assert built[step].fit.eval_every is not None
    report, answers = built["report"], ("o/responses/responses-*.jsonl",)
    assert report.prompts == {"vicuna_7b": "mt_bench", "llama2_13b": "gsm8k", "opt_13b": "alpaca"}[name]
    assert report.template == ("vicuna" if name == "vicuna_7b" else "none")
    assert built["trigrams"].data.path == answers
    if "eesd" in built:  # Table 9
        eesd = built["eesd"]
        assert (eesd.objective, eesd.exit_layer, eesd.seq_len) == ("cross_entropy", 3, 2048)
        assert (eesd.fit.lr, eesd.fit.batch_rows, eesd.fit.epochs) == (1e-3, 64, 4)
        assert eesd.data.mix["generated"].path == answers
        assert {built[step].data.template for step in ("responses", "calibrate")} == {
            "vicuna" if name == "vicuna_7b" else "tokenizer"
        }


def test_a_rehearsal_has_the_target_that_a_user_gives() -> None:
    """Otherwise a toy, not what the experiment is about, which would have to be downloaded."""
    for given, target in ((["target=mine"], "mine"), ([], None)):
        assert pipeline(["experiment=vicuna_7b", "debug=true", *given]).target == target
    as_it_comes = pipeline(["experiment=opt_13b", "~steps.small_lm"])
    assert "small_lm" not in as_it_comes.options("report")
    assert settings_of(as_it_comes)["report"].small_lm == "facebook/opt-125m"


def test_what_you_say_replaces_what_the_experiment_says() -> None:
    """Also of an option with dots, a group and a list; and it is taken back by ~."""
    words = ["eesd.data.mix.open.weight=0.5", "eesd.fit.lr=1e-3", "eesd.data@data.mix.open=python_packages"]
    own = pipeline(["experiment=demo", *(f"steps.{word}" for word in words), "steps.trigrams.orders=[2]"])
    given = {"data.mix.open.weight": 0.5, "fit.lr": 0.001, "data@data.mix.open": "python_packages"}
    assert own.options("eesd") == {**pipeline(["experiment=demo"]).options("eesd"), **given}
    assert own.options("trigrams") == {"tokenizer": f"{HERE}/target", "orders": [2]}
    assert pipeline(["experiment=demo", "~steps.calibrate.fit.wandb.mode", "~steps.calibrate.prompts"]).options(
        "calibrate"
    ) == {"checkpoint": f"{HERE}/eesd", "heldout_prompts": 32, "minutes": 0.4}
    added = pipeline(["experiment=demo", "+steps.eagle3={seq_len:64,keep:1}", "steps.eagle3.fit.steps=9"])
    assert added.options("eagle3") == {"target": f"{HERE}/target", "seq_len": 64, "fit.steps": 9, "keep": 1}


def test_options_may_be_nested() -> None:
    """As in the YAML of a command."""
    step = {"data": {"path": "{out_dir}/x", "max_records": 3}, "orders": [2]}
    placed = PipelineConfig(steps={"trigrams": step}, target="t", out_dir="o").arguments("trigrams")
    assert words_of(placed)[1:4] == ["data.path=o/x", "data.max_records=3", "orders=[2]"]

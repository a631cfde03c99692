"""What every experiment of the pipeline asks of its steps: options that their commands take, minutes, targets."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.base.errors import UserError
from outrider.commands import config_for
from outrider.train.pipeline_run import check_steps
from outrider.train.pipeline_settings import HERE, REPOSITORY, STEPS, PipelineConfig, StepConfig
from tests.conf.test_configs import COMMANDS, GROUPS, compose_and_build
from tests.tiers import quick_where

ROOT = Path(__file__).parents[2]
PAPERS = {  # experiments about targets of the papers: the target, and the steps that they leave out
    "vicuna_7b": ("lmsys/vicuna-7b-v1.3", set()),
    "llama2_13b": ("meta-llama/Llama-2-13b-hf", {"small_lm"}),
    "opt_13b": ("facebook/opt-13b", {"eesd", "calibrate"}),
}
EXPERIMENTS = ("demo", *PAPERS, "smollm2_demo")


def steps_of(experiment: str) -> set[str]:
    if experiment == "smollm2_demo":
        return {"fetch", "prompts", "report"}
    return set(STEPS) - {"eagle3", "fetch", "prompts"} - PAPERS.get(experiment, ("", set()))[1]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", quick_where(lambda name: name == "demo", EXPERIMENTS))
def test_every_step_is_what_its_command_takes(name: str, debug: bool) -> None:
    """In a rehearsal without a network, in the directory of the rehearsal."""
    words = [f"experiment={name}", f"debug={str(debug).lower()}"]
    config = compose_and_build("pipeline", words)
    assert set(config.to_do) == (steps_of(name) - {"target"} if name in PAPERS and not debug else steps_of(name))
    scripts = {script: command for command, (_, script, _) in COMMANDS.items()}
    small = check_steps(config, config_for) if debug else {}
    here = "o-debug" if debug else "o"
    for step in config.steps:
        options = [*config.options(step), *small.get(step, ())]
        options = [option.replace(HERE, here).replace(REPOSITORY, "r") for option in options]
        built = compose_and_build(scripts[STEPS[step].script], [*options, f"out_dir={here}/{step}", "resume=true"])
        if hasattr(built, "data") and (debug or name not in PAPERS):
            sources = [part.source for _, _, part in built.data.parts()] or [built.data.source]
            assert set(sources) <= {"python_stdlib", "local"}  # no network
        if hasattr(built, "fit"):
            assert built.fit.wandb.mode == "disabled"
        if debug:
            fitted = hasattr(built, "fit") and (built.data.cache_dir, built.fit.steps)
            assert fitted in (False, (f"{config.out_dir}-debug/cache", 2))
            given = (getattr(built, name, None) for name in ("small_lm", "checkpoint", "table", "eagle3"))
            assert all(Path(where).is_relative_to(here) for where in given if where is not None)
    if not debug:
        assert config.out_dir == f"runs/{name}"


def minutes_of(config: PipelineConfig) -> float:
    """What all steps together are given."""
    given = [option for name in config.to_do for option in config.options(name) if option.startswith("minutes=")]
    return sum(float(option.partition("=")[2]) for option in given)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_whole_takes_the_minutes_that_are_there(name: str) -> None:
    """The steps get more or less, all in proportion, and what is asked of a step itself counts."""
    plain = compose_and_build("pipeline", [f"experiment={name}"])
    whole = sum(plain.expected_minutes(step) for step in plain.to_do)
    for minutes in (0.6 * whole, 2 * whole):
        config = compose_and_build("pipeline", [f"experiment={name}", f"minutes={minutes}"])
        assert sum(config.expected_minutes(step) for step in config.to_do) == pytest.approx(minutes)
        assert minutes_of(config) == pytest.approx(minutes_of(plain) + minutes - whole, rel=0.02)
        assert [o for o in config.options("report") if not o.startswith("minutes=")] == [
            o for o in plain.options("report") if not o.startswith("minutes=")
        ]
    mine = compose_and_build("pipeline", [f"experiment={name}", f"minutes={whole}", 'steps.report.more=["minutes=99"]'])
    assert "minutes=99" in mine.options("report")


def test_minutes_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(UserError, match=r"minutes=3\.0: expected more than the 3\.3 of loading, counting and saving"):
        compose_and_build("pipeline", ["experiment=demo", "minutes=3"])
    with pytest.raises(UserError, match=r"expected null: how long eesd will take is not known"):
        PipelineConfig(steps={"eesd": StepConfig()}, minutes=30.0)
    with pytest.raises(UserError, match="expected null with debug=true"):
        compose_and_build("pipeline", ["experiment=demo", "minutes=30", "debug=true"])


@pytest.mark.parametrize(("name", "most"), [("demo", 12), ("smollm2_demo", 5), *((name, 185) for name in PAPERS)])
def test_the_time_left_is_told_by_what_steps_are_expected_to_take(name: str, most: int) -> None:
    """Each step, none less than it has by its options; in all what README says."""
    config = compose_and_build("pipeline", [f"experiment={name}"])
    expected = {step: config.steps[step].expected_minutes for step in config.to_do}
    for step, minutes in expected.items():
        own = [option for option in config.options(step) if option.startswith("minutes=")]
        assert minutes >= max([0.0, *(float(option.partition("=")[2]) for option in own)])
    assert 0.5 * most <= sum(expected.values()) <= most


def test_the_demo_has_so_many_minutes_on_any_machine() -> None:
    """Whatever takes longer on a slower machine is limited: all but reading, counting and loading."""
    config = compose_and_build("pipeline", ["experiment=demo"])
    scripts = {script: command for command, (_, script, _) in COMMANDS.items()}
    minutes = {}
    for step in set(config.to_do) - {"trigrams"}:
        options = [option.replace(HERE, "o") for option in config.options(step)]
        built = compose_and_build(scripts[STEPS[step].script], options)
        minutes[step] = built.minutes
        assert not hasattr(built, "decode_prompts") or built.fit.eval_every is None  # one evaluation, at the end
    assert sum(minutes.values()) <= 8
    assert minutes["target"] == max(minutes.values())


def test_drafters_that_no_step_trains_are_given() -> None:
    """A link to what a step would leave is no option where the step is left out."""
    config = compose_and_build("pipeline", ["experiment=smollm2_demo"])
    options, names = config.options("report"), ("eesd", "small_lm", "trigrams")
    shipped = {f"{REPOSITORY}/drafters/smollm2/{name}" for name in names}
    assert {option.partition("=")[2] for option in options if "drafters/" in option} == shipped
    assert "target={out_dir}/fetch" in options
    assert not any(f"{HERE}/{name}" in option for name in names for option in options)
    mine = compose_and_build("pipeline", ["experiment=smollm2_demo", 'steps.report.more=["small_lm=m"]'])
    assert "small_lm=m" in mine.options("report")
    assert "table={out_dir}/trigrams" in compose_and_build("pipeline", ["experiment=demo"]).options("report")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_another_target_takes_the_place_of_the_step_that_would_make_one(name: str) -> None:
    config = compose_and_build("pipeline", [f"experiment={name}", "target=mine"])
    assert set(config.to_do) == steps_of(name) - {"target", "fetch"}
    given = {step for step in config.to_do if "target=mine" in config.options(step)}
    if name == "smollm2_demo":
        assert given == {"report"}
    else:
        assert given == {"responses", "eesd", "small_lm", "eagle3", *(["report"] if name != "demo" else [])} & steps_of(
            name
        )
        assert "tokenizer=mine" in config.options("trigrams")
    assert not any("{target}" in option for step in config.to_do for option in config.options(step))


def test_the_experiments_in_no_folder_are_the_pipelines() -> None:
    assert {path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")} == set(EXPERIMENTS)
    assert set(GROUPS["experiment"]) == set(EXPERIMENTS)


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_s_experiment_is_bounded_and_about_its_target(name: str) -> None:
    """All that takes long has minutes, each training is watched by what it decodes, and data and prompts are named."""
    config, scripts = compose_and_build("pipeline", [f"experiment={name}"]), {c[1]: key for key, c in COMMANDS.items()}
    assert config.target == PAPERS[name][0]
    built = {}
    for step in config.to_do:
        options = [option.replace(HERE, "o") for option in config.options(step)]
        built[step] = compose_and_build(scripts[STEPS[step].script], options)
        assert step == "trigrams" or built[step].minutes > 0
        assert getattr(built[step], "target", None) in (None, config.target)
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
        assert compose_and_build("pipeline", ["experiment=vicuna_7b", "debug=true", *given]).target == target
    as_it_comes = compose_and_build("pipeline", ["experiment=opt_13b", "~steps.small_lm"]).options("report")
    assert not any(option.startswith("small_lm=") for option in as_it_comes)
    options = [option.replace(HERE, "o") for option in as_it_comes]
    assert compose_and_build("evaluate_checkpoint", options).small_lm == "facebook/opt-125m"


def test_a_later_option_replaces_an_earlier_one() -> None:
    step = StepConfig(["a=1", "data=x", "+c=3"], ["++c=4", "data=y"])
    config = PipelineConfig(steps={"trigrams": step})
    assert config.options("trigrams") == ["tokenizer={out_dir}/target", "a=1", "data=y", "++c=4"]
    taken_back = StepConfig(["a=1", "b=2"], ["~b", "~c", "~tokenizer"])  # of c nothing is known here: Hydra's own
    assert PipelineConfig(steps={"trigrams": taken_back}).options("trigrams") == ["a=1", "~c"]
    assert "tokenizer=mine" in replace(config, steps={"trigrams": StepConfig(more=["tokenizer=mine"])}).options(
        "trigrams"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": {}}, "steps=.*expected at least one step"),
        ({"steps": {"target": StepConfig(), "fetch": StepConfig()}}, "steps=.*expected one of target, fetch"),
        ({"steps": {"evaluate": StepConfig()}}, "steps='evaluate': expected one of target"),
    ],
)
def test_impossible_pipelines_name_the_key(changes, message) -> None:
    with pytest.raises(UserError, match=message):
        PipelineConfig(**changes)


@pytest.mark.parametrize(
    ("option", "message"), [("fit.steps", "expected KEY=VALUE"), ("out_dir=x", "expected none of")]
)
def test_impossible_options_are_refused(option: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        StepConfig(more=[option])

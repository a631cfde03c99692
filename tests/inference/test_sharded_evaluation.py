"""Whole evaluations by several processes, killed and resumed: the results of one that ran through."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from filelock import FileLock
from safetensors.torch import load_file, save_file

from benchmarks.planted_faults import rope_scaled
from data_prep.prompts import Prompt
from draft_models.checkpoint import fingerprint_target, save_pretrained
from draft_models.errors import UserError
from draft_models.target import LayerStack, load_config, load_tokenizer
from draft_models.tensor_files import open_target
from inference import compare
from inference.attention_kernels import KernelChoice, attention_shape
from inference.evaluation import Arm
from inference.graphed import Graphed
from inference.prompt_results import Measured, append_result, read_results
from inference.settings import EvaluateConfig, MethodConfig, SamplingConfig, StopConfig, StructureConfig
from tests.tiny import LAYERS, byte_tokenizer, make_drafter, save_target

ROOT = Path(__file__).parent.parent.parent


QUESTIONS = [
    Prompt("a", "code", ("def add(first, second):",), False),
    Prompt("b", "chat", ("question one?", "and then?"), True),
    Prompt("c", "code", ("class Round:",), False),
    Prompt("d", "chat", ("question two?", "why?"), True),
    Prompt("e", "text", ("once upon a time",), False),
]


METHODS = {
    "chain": MethodConfig(stop=StopConfig(rule="fixed", max_draft=3)),
    "tree": MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=6)),  # its delta is measured
}


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """As without a GPU, for what is forked here has none: CUDA cannot be used again in a fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        yield


def render(tokenizer: object, messages: Sequence[dict[str, str]], chat: bool) -> list[int]:
    text = "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages) if chat else messages[0]["content"]
    return [byte % 250 for byte in text.encode()][-120:]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a drafter for it."""
    folder = tmp_path_factory.mktemp("models")
    path = str(save_target(folder / "target"))
    byte_tokenizer().save_pretrained(path)
    fingerprint = fingerprint_target(open_target(path), load_config(path), load_tokenizer(path))
    drafter = make_drafter(Path(path), LAYERS - 1, noise=0.05)
    save_pretrained(folder / "drafter", drafter, fingerprint, {}, torch.float32)
    return folder


@pytest.fixture
def config(models: Path, tmp_path: Path) -> Callable[..., EvaluateConfig]:
    def make(name: str, **changes: object) -> EvaluateConfig:
        settings = {"checkpoint": str(models / "drafter"), "methods": METHODS, "max_new_tokens": 10, "device": "cpu",
                    "threads": 1, "out_dir": str(tmp_path / name)}  # fmt: skip
        return EvaluateConfig(**{**settings, **changes})

    return make


def evaluate(config: EvaluateConfig, prompts: Sequence[Prompt] = QUESTIONS) -> None:
    compare.evaluate_checkpoint(config, prompts, render)


def tokens(config: EvaluateConfig) -> dict[tuple[str, str], list[int]]:
    """What every arm said to every turn, in the order of the file."""
    lines = (Path(config.out_dir) / "generations.jsonl").read_text().splitlines()
    return {(line["id"], line["arm"]): line["tokens"] for line in map(json.loads, lines)}


def facts(config: EvaluateConfig) -> list[dict[str, object]]:
    """What the reports say that is no time."""
    path = Path(config.out_dir) / "report.json"
    reports = json.loads(path.read_text())["reports"]
    kept = ("method", "lossless", "prompts", "turns", "skipped", "tokens", "tau", "acceptance_rate",
            "acceptance_by_position")  # fmt: skip
    return [{key: report[key] for key in kept if report["method"] == "chain" or key in kept[:6]} for report in reports]


def processes(config: EvaluateConfig) -> int:
    return json.loads((Path(config.out_dir) / "report.json").read_text())["reports"][0]["processes"]


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluateConfig:
    """The evaluation that all others must equal: one process, from beginning to end."""
    out_dir = str(tmp_path_factory.mktemp("alone") / "out")
    made = EvaluateConfig(checkpoint=str(models / "drafter"), methods=METHODS, max_new_tokens=10, device="cpu",
                          threads=1, out_dir=out_dir)  # fmt: skip
    evaluate(made)
    return made


def killed_after(config: EvaluateConfig, prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`evaluate`, whose process is killed as by SIGKILL when that many prompts are done: nothing is cleaned up."""

    def run() -> None:
        def append(*arguments: object) -> None:
            append_result(*arguments)  # type: ignore[arg-type]
            if len(read_results(Path(config.out_dir))) == prompts:
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(compare, "append_result", append)
        evaluate(config)

    job = multiprocessing.get_context("fork").Process(target=run)
    job.start()
    job.join(timeout=120)
    assert job.exitcode == -signal.SIGKILL


def together(config: EvaluateConfig, count: int, prepare: Callable[[int], object] = lambda rank: None) -> list[int]:
    """Exit statuses of `count` processes that evaluate as under a launcher; `prepare(rank)` runs in each before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                       "LOCAL_WORLD_SIZE": str(count),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        PartialState._reset_state()
        state = PartialState(cpu=True)
        compare.join_processes = lambda: state
        prepare(rank)
        try:
            evaluate(config)
        except UserError as error:
            print(error)
            sys.exit(2)
        state.destroy_process_group()

    fork = multiprocessing.get_context("fork")
    jobs = [fork.Process(target=run, args=(rank,)) for rank in range(count)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(timeout=120)
    assert all(job.exitcode is not None for job in jobs), "a process hangs"
    return [job.exitcode for job in jobs]


def test_two_processes_equal_one(alone: EvaluateConfig, config: Callable[..., EvaluateConfig]) -> None:
    made = config("two")
    assert together(made, 2) == [0, 0]
    assert tokens(made) == tokens(alone)
    assert list(tokens(made)) == list(tokens(alone))  # in the order of the prompts, whoever measured them
    assert facts(made) == facts(alone)
    assert [processes(alone), processes(made)] == [1, 2]
    shares = [[json.loads(line)["position"] for line in path.read_text().splitlines()]
              for path in sorted(Path(made.out_dir).glob("results-*"))]  # fmt: skip
    assert shares == [[0, 2, 4], [1, 3]]
    table = (Path(made.out_dir) / "report.md").read_text()
    assert "interleaved prompt by prompt, 2 processes at a time." in table
    assert "at a time" not in (Path(alone.out_dir) / "report.md").read_text()


@pytest.mark.parametrize("then", [1, 2])
def test_what_was_left_out_is_known_to_the_report(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch, then: int
) -> None:
    """Whichever process or run left it out: by name and reason, what was asked behind it too."""
    monkeypatch.setattr(compare, "context_length", lambda *_: 45)  # second turns have 48 tokens and more
    made = config("short", methods={"chain": METHODS["chain"]})
    killed_after(made, 2, monkeypatch)
    resumed = replace(made, resume=True)
    if then == 1:
        evaluate(resumed)
    else:
        assert together(resumed, then) == [0] * then
    report = json.loads((Path(made.out_dir) / "report.json").read_text())
    assert (report["prompts"], report["turns"]) == (5, 5)
    assert [left_out["prompt_id"] for left_out in report["skipped"]] == ["b/turn2", "d/turn2"]
    assert all(left_out["reason"].endswith("in a context of 45") for left_out in report["skipped"])
    assert "Left out: b/turn2 (" in (Path(made.out_dir) / "report.md").read_text()
    assert report["end_to_end"]["prompts"] == 5
    assert report["autoregressive"]["host_us"] > 0


def test_sampled_texts_do_not_depend_on_who_measured(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, two, or one that was killed and three that went on: an id has its text."""
    methods = {
        "beta": MethodConfig(stop=StopConfig(rule="beta")),
        "tree": MethodConfig(structure=StructureConfig(kind="k_config", widths=(2, 2))),
    }
    options = {"methods": methods, "sampling": SamplingConfig(temperature=1.0), "seed": 3}
    one, two, killed = (config(name, **options) for name in ("one", "two", "killed"))
    evaluate(one)
    assert together(two, 2) == [0, 0]
    killed_after(killed, 2, monkeypatch)
    assert together(replace(killed, resume=True), 3) == [0, 0, 0]
    assert tokens(one) == tokens(two) == tokens(killed)


@pytest.mark.parametrize("then", [1, 3])
def test_killed_and_resumed(
    alone: EvaluateConfig,
    config: Callable[..., EvaluateConfig],
    monkeypatch: pytest.MonkeyPatch,
    then: int,
) -> None:
    """By as many processes as there were, or more: the same generations, and what was finished is not done again."""
    made = config("killed")
    killed_after(made, 2, monkeypatch)
    folder = Path(made.out_dir)
    assert not (folder / "report.json").exists()
    before = (folder / "results-00000.jsonl").read_bytes()
    prepared = json.loads((folder / "run.json").read_text())["prepared"]
    (folder / "results-00000.jsonl").write_bytes(before + before[:100])  # a third prompt, half written
    resumed = replace(made, resume=True)
    if then == 1:
        evaluate(resumed)
    else:
        assert together(resumed, then) == [0] * then
    assert tokens(made) == tokens(alone)
    assert list(tokens(made)) == list(tokens(alone))
    assert facts(made) == facts(alone)
    assert processes(made) == then
    assert (folder / "results-00000.jsonl").read_bytes() == before + before[:100]
    fresh = [json.loads(line)["position"] for path in folder.glob("results-*") if path.name != "results-00000.jsonl"
             for line in path.read_text().splitlines()]  # fmt: skip
    assert sorted(fresh) == [2, 3, 4]
    report = json.loads((folder / "report.json").read_text())["reports"][1]
    assert report["settings"] == prepared["methods"]["tree"]  # measured before the kill, and not again
    assert 0 < report["settings"]["structure"]["delta"] <= 1


def test_a_finished_run_is_kept(alone: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed, it loads no target and writes the same report; without resume=true it is refused."""
    with pytest.raises(UserError, match="holds results already; resume=true continues them, another out_dir keeps"):
        evaluate(alone)
    before = tokens(alone)
    monkeypatch.setattr(compare, "load_models", None)
    evaluate(replace(alone, resume=True))
    assert tokens(alone) == before


def test_other_settings_are_refused(
    alone: EvaluateConfig, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = replace(alone, resume=True)
    fewer = {"chain": METHODS["chain"]}
    longer = {**METHODS, "chain": MethodConfig(stop=StopConfig(rule="fixed", max_draft=4))}
    path = str(models / "target")
    fingerprint = fingerprint_target(open_target(path), load_config(path), load_tokenizer(path))
    other = make_drafter(Path(path), LAYERS - 1, noise=0.1)
    save_pretrained(tmp_path / "other", other, fingerprint, {}, torch.float32)
    calibrated = shutil.copytree(models / "drafter", tmp_path / "calibrated")
    (calibrated / "calibration.json").write_text("{}")
    monkeypatch.setattr(compare, "load_models", None)  # each is refused before the target's weights are read
    for changes, message in (
        ({"max_new_tokens": 11}, r"other settings: max_new_tokens=11 \(was 10\)"),
        ({"methods": longer}, r"methods.chain.stop.max_draft=4 \(was 3\)"),
        ({"methods": fewer}, r"methods\.tree=absent \(was given\); give the same ones"),
        ({"checkpoint": str(tmp_path / "other")}, r'settings: checkpoint="[0-9a-f]{16}" \(was "[0-9a-f]{16}"\)'),
        ({"dtype": "bfloat16"}, r'dtype="bfloat16" \(was "float32"\)'),
        ({"sampling": SamplingConfig(temperature=0.5)}, r"sampling.temperature=0.5 \(was 0.0\)"),
        ({"checkpoint": str(calibrated)}, r'calibration="[0-9a-f]{16}" \(was null\)'),
        ({"small_lm": path}, r"small_lm=given \(was null\)"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(replace(resumed, **changes))
    with pytest.raises(UserError, match=r"settings: prompts="):
        evaluate(resumed, QUESTIONS[:-1])
    monkeypatch.setattr("inference.subject.describe_machine", lambda _: {"device": "another chip"})
    with pytest.raises(UserError, match=r'settings: device="cpu \(another chip\)" \(was "cpu \('):
        evaluate(resumed)


def test_another_target_is_refused(
    models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known by its weights: it may lie elsewhere."""
    other, same = save_target(tmp_path / "other", seed=3), shutil.copytree(models / "target", tmp_path / "same")
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    made = config("made", checkpoint=None, target=str(models / "target"), methods=methods)
    evaluate(made, QUESTIONS[:1])
    monkeypatch.setattr(compare, "load_models", None)
    with pytest.raises(UserError, match=r'target.weights="[0-9a-f]{16}" \(was "[0-9a-f]{16}"\);'):
        evaluate(replace(made, target=str(other), resume=True), QUESTIONS[:1])
    evaluate(replace(made, target=str(same), resume=True), QUESTIONS[:1])
    (same / "generation_config.json").write_text('{"eos_token_id": [7]}')
    with pytest.raises(UserError, match=r"settings: end_tokens=\[7\]"):
        evaluate(replace(made, target=str(same), resume=True), QUESTIONS[:1])


@pytest.mark.parametrize("change", ["a layer in the middle", "rope_theta", "the code", "transformers"])
def test_a_target_or_code_that_was_changed_in_place_is_refused(
    models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """One report is of one target and one program; the drafter, here none, need not notice."""
    path = shutil.copytree(models / "target", tmp_path / "target")
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    made = config("made", checkpoint=None, target=str(path), methods=methods, resume=True)
    evaluate(made, QUESTIONS[:1])
    before = {file.name: file.read_bytes() for file in Path(made.out_dir).glob("r*.json*")}
    monkeypatch.setattr(compare, "load_models", None)
    if change == "a layer in the middle":
        stored = load_file(path / "model.safetensors")
        stored["model.layers.1.mlp.up_proj.weight"] += 0.1
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        named = r"target\.tensors\.model\.layers\.1="
    elif change == "rope_theta":
        stored = json.loads((path / "config.json").read_text())
        stored["rope_parameters"]["rope_theta"] = 5e5
        (path / "config.json").write_text(json.dumps(stored))
        named = r"target\.config\.rope_parameters\.rope_theta=500000.0 \(was 10000.0\)"
    elif change == "the code":
        monkeypatch.setattr("inference.subject.code_version", lambda: "0.2+abc")
        named = r'versions\.code="0\.2\+abc" \(was "'
    else:
        monkeypatch.setattr("inference.subject.transformers.__version__", "9.9")
        named = r'versions\.transformers="9\.9" \(was "'
    with pytest.raises(UserError, match=f"was made with other settings: {named}"):
        evaluate(made, QUESTIONS[:1])
    assert {file.name: file.read_bytes() for file in Path(made.out_dir).glob("r*.json*")} == before


def test_arms_are_warm_and_take_turns_at_being_first(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, str]] = []
    make = compare.make_arms

    def noted(*models: object, max_new_tokens: int, **options: object) -> dict[str, Arm]:
        def noting(name: str, arm: Arm) -> Arm:
            return lambda *given: (calls.append((max_new_tokens, name)), arm(*given))[1]

        arms = make(*models, max_new_tokens=max_new_tokens, **options)  # type: ignore[arg-type]
        return {name: noting(name, arm) for name, arm in arms.items()}

    monkeypatch.setattr(compare, "make_arms", noted)
    evaluate(config("turns", methods={"chain": METHODS["chain"]}), QUESTIONS[:3])  # the second has two turns
    names = ["autoregressive", "chain", "transformers_generate"]
    measured = [name for first in (0, 1, 2, 2) for name in names[first:] + names[:first]]
    assert calls == [(8, name) for name in names] + [(10, name) for name in measured]


def test_a_conversation_goes_on_with_the_targets_own_answers(
    models: Path, config: Callable[..., EvaluateConfig]
) -> None:
    """A turn beyond the context ends it."""
    seen: list[list[tuple[str, str]]] = []

    def noted(_: object, messages: Sequence[dict[str, str]], chat: bool) -> list[int]:
        seen.append([(m["role"], m["content"]) for m in messages])
        return [byte % 250 for byte in messages[-1]["content"].encode()]

    auto = MethodConfig(stop=StopConfig(max_draft="auto"))
    made = config("talk", methods={"auto": auto})
    turns = ("x" * 246, "and then?", "x" * 247, "never asked")  # of 256 positions, 10 are for the answer
    compare.evaluate_checkpoint(made, [Prompt("p", "chat", turns, True)], noted)
    results = read_results(Path(made.out_dir))[0].turns
    assert [r.prompt_id for r in results] == ["p/turn1", "p/turn2"]
    assert [r.conversation for r in results] == ["p", "p"]
    tokenizer = load_tokenizer(str(models / "target"))
    said = [tokenizer.decode(list(r.generations["autoregressive"].tokens), skip_special_tokens=True) for r in results]
    talk = [("user", turns[0]), ("assistant", said[0]), ("user", turns[1]), ("assistant", said[1]), ("user", turns[2])]
    alone = [[("user", turn)] for turn in turns]  # to see whether the first fits, and how long the texts may get
    assert seen == [*alone, talk[:1], talk[:3], talk]
    report = json.loads((Path(made.out_dir) / "report.json").read_text())
    assert set(report["auto"]["chosen"]) == {"max_draft"}
    assert report["skipped"] == [
        {"prompt_id": "p/turn3", "reason": "247 tokens and 10 new ones in a context of 256"},
        {"prompt_id": "p/turn4", "reason": "a turn before it was left out"},
    ]


def test_half_precision_and_sampling_are_judged(config: Callable[..., EvaluateConfig]) -> None:
    """Every arm of this runtime on evenly spread prompts, all turns; what was found decides verdict and exit status."""
    half = config("half", dtype="bfloat16")
    sampled = config("sampled", sampling=SamplingConfig(temperature=1.0))
    for made in (half, sampled):
        evaluate(made, QUESTIONS * 4)
        judged = [bool(r.deviations) for found in read_results(Path(made.out_dir)).values() for r in found.turns[:1]]
        assert compare.JUDGED <= sum(judged) <= compare.JUDGED + (5 if made is half else 0)  # those with a mismatch
        for report in json.loads((Path(made.out_dir) / "report.json").read_text())["reports"]:
            for arm in ("autoregressive", report["method"]):
                assert report["lossless"]["judged"][arm]["faults"] == []
        assert "No fault" in (Path(made.out_dir) / "report.md").read_text()
    for made in (replace(half, out_dir=half.out_dir + "!"), replace(sampled, out_dir=sampled.out_dir + "!")):
        with rope_scaled(1.01), pytest.raises(SystemExit) as left:
            evaluate(made)
        assert left.value.code == 1
        for report in json.loads((Path(made.out_dir) / "report.json").read_text())["reports"]:
            assert report["verdict"] == "not lossless"
            assert "keys of layer 0" in report["lossless"]["judged"]["autoregressive"]["faults"][0]


def test_kernels_are_chosen_once_for_a_run(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process measures them; a resumed run uses what it found, whatever it would find now."""
    used: list[Sequence[KernelChoice]] = []
    found = iter(["products", "fused", "fused"])
    prepare = Graphed.prepare

    def measured(_: object, stacks: Sequence[LayerStack], positions: int) -> tuple[KernelChoice, ...]:
        return (KernelChoice(*attention_shape(stacks[0].config), 1, positions, next(found)),)

    def noted(runtime: Graphed, positions: int, choices: Sequence[KernelChoice]) -> None:
        used.append(tuple(choices))
        prepare(runtime, positions, choices)

    monkeypatch.setattr(Graphed, "choose_kernels", measured)
    monkeypatch.setattr(Graphed, "prepare", noted)
    made = config("kernels", runtime="graphed", compare_transformers=False)
    evaluate(made, QUESTIONS[:2])
    first = used[-1]
    assert [choice.kernel for choice in first] == ["products"]
    (results,) = Path(made.out_dir).glob("results-*.jsonl")
    results.write_bytes(results.read_bytes().splitlines(keepends=True)[0])
    evaluate(replace(made, resume=True), QUESTIONS[:2])
    assert used[-1] == first
    assert next(found) == "fused"  # nobody asked again


def test_one_run_at_a_time(config: Callable[..., EvaluateConfig]) -> None:
    made = config("locked")
    Path(made.out_dir).mkdir()
    with FileLock(Path(made.out_dir) / ".lock"):
        with pytest.raises(UserError, match="another run is writing results there"):
            evaluate(made)
        assert together(made, 2) == [2, 2]


def test_no_process_waits_for_one_that_failed(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong on the main process is the same failure on all; one that is not lossless is everybody's."""
    used = config("used")
    Path(used.out_dir).mkdir()
    append_result(Path(used.out_dir), 0, Measured(0, 1, ()))
    assert together(used, 2) == [2, 2]
    one_gpu = config("one_gpu")
    pick = torch.device("cpu", 0)
    monkeypatch.setattr("inference.subject.pick_device", lambda name: pick)
    assert together(one_gpu, 2) == [2, 2]
    monkeypatch.undo()

    def wrong(rank: int) -> None:
        compare.is_lossless = lambda report: report["method"] != "tree"

    assert together(config("wrong"), 2, wrong) == [1, 1]
    assert len(tokens(config("wrong"))) == 7 * 4


def test_a_process_that_fails_in_its_share_ends_the_others(
    alone: EvaluateConfig, config: Callable[..., EvaluateConfig]
) -> None:
    """A launcher ends them at once, gloo when they wait for it; what was finished is there for the next run."""
    made = config("failed")

    def failing(rank: int) -> None:
        def measure(*_: object) -> None:
            raise UserError("this device is broken")

        if rank == 1:
            compare.measure_prompt = measure

    statuses = together(made, 2, failing)
    assert statuses[1] == 2
    assert statuses[0] != 0
    assert sorted(read_results(Path(made.out_dir))) == [0, 2, 4]
    assert together(replace(made, resume=True), 2) == [0, 0]
    assert list(tokens(made).items()) == list(tokens(alone).items())


def test_the_command_under_a_launcher(models: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = ["-m", "accelerate.commands.launch", "--config_file=conf/accelerate/ddp.yaml", "--num_processes=2",
              f"--main_process_port={port}"]  # fmt: skip
    command = ["inference/evaluate_checkpoint.py", f"checkpoint={models / 'drafter'}", "method=eesd_fixed",
               "prompt_text=[one text,and another,a third]", "max_new_tokens=10", f"out_dir={tmp_path}"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, *launch, *command], env=environment, cwd=ROOT, timeout=300, check=False,
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["processes"], report["prompts"]) == (2, 3)
    assert report["lossless"]["identical"] == 3
    assert list(report["speedup_per_prompt"]) == ["inline:1", "inline:2", "inline:3"]

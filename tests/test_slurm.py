"""The cluster scripts, run with stand-ins for Slurm and the launchers that record what they were called with."""

import os
import re
import shutil
import stat
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from outrider.commands import CONF_DIR
from outrider.commands.composing import build, compose_config
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.train.settings.drafters import EesdConfig
from tests.conf.test_configs import compose_and_build, written_commands

ROOT = Path(__file__).parent.parent
SLURM = ROOT / "slurm"
SCRIPTS = sorted([*SLURM.glob("*.sh"), *SLURM.glob("*.sbatch")])
ACCELERATE = sorted((CONF_DIR / "accelerate").glob("*.yaml"))
RECORD = 'printf "%s\\0" "$(basename "$0")" "$@" >> "$CALLS"; printf "\\n" >> "$CALLS"\n'
STAND_INS = {
    "accelerate": RECORD + 'eval "${BEHAVIOUR:-}"',
    "evaluate-checkpoint": RECORD,
    "wandb": RECORD,
    "scontrol": RECORD + 'kill -TERM "$(cat "$TMPDIR/work")"',
    # One task per node, one after another; its own options end at the first word without a dash.
    "srun": RECORD
    + 'while [ "${1#-}" != "$1" ]; do shift; done\n'
    + 'for node in $(seq 0 $((${SLURM_NNODES:-1} - 1))); do SLURM_NODEID=$node "$@" || exit; done',
    "sbatch": RECORD + 'echo "$(($(grep -c ^sbatch "$CALLS") + 100));cluster"',
}


class Cluster:
    """Runs a script of slurm/ as Slurm would on the first node of a job; `calls` are the commands it came to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.record = folder, folder / "calls"
        self.record.touch()
        for name, body in STAND_INS.items():
            file = folder / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"#!/usr/bin/env bash\n{body}\n")
            file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen:
        ours = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(self.folder),
            "HOME": str(self.folder),
            "CALLS": str(self.record),
            "SLURM_JOB_ID": "4711",
            "SLURM_NNODES": "1",
        }
        return subprocess.Popen(
            ["bash", SLURM / script, *arguments],
            env={**ours, **environment}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, script: str, *arguments: str, status: int = 0, **environment: str) -> str:
        job = self.start(script, *arguments, **environment)
        out, err = job.communicate(timeout=60)
        assert job.returncode == status, out + err
        return out + err

    def calls(self, command: str) -> list[list[str]]:
        lines = self.record.read_text().split("\0\n")
        return [line.split("\0")[1:] for line in lines if line.split("\0")[0] == command]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def parsed(arguments: list[str]) -> Namespace:
    """What `accelerate launch` makes of its arguments."""
    known = launch_command_parser().parse_args(arguments[1:])
    return _validate_launch_command(known)[0]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def test_one_gpu_several_nodes_and_a_strategy_of_choice(cluster: Cluster) -> None:
    cluster.run("train.sbatch", "train/eesd.py", "target=m", "prompt=two words", SLURM_CPUS_PER_TASK="8")
    cluster.run("train.sbatch", "train/eesd.py", "out_dir=o", SLURM_NNODES="3", SLURM_GPUS_ON_NODE="4")
    config = "conf/accelerate/zero3.yaml"
    cluster.run("train.sbatch", "s.py", ACCELERATE_CONFIG=config, SLURM_NNODES="2", SLURM_GPUS_ON_NODE="8")
    first, *launches = cluster.calls("accelerate")
    assert first[-4:] == ["train/eesd.py", "target=m", "prompt=two words", "out_dir=runs/eesd-4711"]
    alone = parsed(first)
    assert alone.config_file == "conf/accelerate/one_gpu.yaml"
    assert (alone.num_machines, alone.num_processes, alone.multi_gpu) == (1, 1, False)
    *nodes, _, sharded = map(parsed, launches)
    assert [launch.machine_rank for launch in nodes] == [0, 1, 2]
    host = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    for launch in nodes:
        assert (launch.num_machines, launch.num_processes, launch.multi_gpu) == (3, 12, True)
        assert (launch.main_process_ip, launch.main_process_port) == (host, 24711)
        assert launch.training_script_args == ["out_dir=o"]
    assert (sharded.use_deepspeed, sharded.zero_stage, sharded.deepspeed_multinode_launcher) == (True, 3, "standard")
    assert (sharded.num_machines, sharded.num_processes, sharded.machine_rank) == (2, 16, 1)


def test_the_processes_of_a_node_share_its_cores(cluster: Cluster) -> None:
    job = {"SLURM_CPUS_PER_TASK": "8", "BEHAVIOUR": "echo threads=$OMP_NUM_THREADS", "SLURM_NNODES": "2"}
    gpus, threads = "SLURM_GPUS_ON_NODE", "OMP_NUM_THREADS"
    for name, count, expected in ((gpus, "0", 8), (gpus, "4", 2), (threads, "3", 3)):
        assert {*cluster.run("train.sbatch", "s.py", **job, **{name: count}).split()} == {f"threads={expected}"}


@pytest.mark.parametrize(("restarts", "requeued"), [("2", True), ("3", False)])
@pytest.mark.parametrize("script", ["train.sbatch", "evaluate.sbatch"])
@pytest.mark.slow
def test_out_of_time(cluster: Cluster, script: str, restarts: str, requeued: bool) -> None:
    """USR1 while the work runs: the job is requeued, the work left alone, and its status is the job's."""
    work = 'echo $$ > "$TMPDIR/work"; for _ in $(seq 100); do [ -f "$TMPDIR/over" ] && exit 7; sleep 0.05; done'
    job = cluster.start(script, "s.py", BEHAVIOUR=work, SLURM_RESTART_COUNT=restarts, MAX_RESTARTS="3")
    deadline = time.monotonic() + 30
    while not (cluster.folder / "work").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(subprocess.signal.SIGUSR1)
    if not requeued:  # else the stand-in for scontrol ends the work, as Slurm would
        time.sleep(0.3)
        (cluster.folder / "over").touch()
    out, _ = job.communicate(timeout=60)
    assert cluster.calls("scontrol") == ([["requeue", "4711"]] if requeued else [])
    assert f"restart {int(restarts) + 1}" in out if requeued else "MAX_RESTARTS" in out
    assert job.returncode == (143 if requeued else 7)


def test_a_table_in_parts(cluster: Cluster, tmp_path: Path) -> None:
    """The parts share the files out, each of them is merged once, and limits apply to the whole alone."""
    python = cluster.folder / "bin" / "python"
    python.write_text(f"#!/usr/bin/env bash\n{RECORD}")
    python.chmod(0o755)
    files = [tmp_path / f"c{number}.jsonl" for number in range(7)]
    for file in files:
        file.write_text('{"text": "a"}\n')
    given = ["3", str(tmp_path / "o"), "~/c*.jsonl", "tokenizer=t", "orders=[2,3]", "max_mb=5"]
    assert cluster.run("ngrams.sh", *given).split() == ["parts", "101", "whole", "102"]
    array, whole = cluster.calls("sbatch")
    assert array == ["--parsable", "--array=1-2", "slurm/ngrams.sbatch", *given]
    assert whole == ["--parsable", "--dependency=afterok:101", "--kill-on-invalid-dep=yes", *array[2:]]
    for task in ({"SLURM_ARRAY_TASK_ID": "1"}, {"SLURM_ARRAY_TASK_ID": "2"}, {}):
        cluster.run("ngrams.sbatch", *given, **task)
    *parts, last = (compose_and_build("build_trigrams", call[1:]) for call in cluster.calls("python"))
    assert sorted(path for config in (*parts, last) for path in config.data.path) == sorted(map(str, files))
    assert [Path(config.out_dir).name for config in parts] == ["1", "2"]
    assert last.merge == tuple(config.out_dir for config in parts)
    assert all((c.min_count, c.max_mb, c.data.heldout_fraction, c.resume) == (1, None, 0, True) for c in parts)
    assert (last.min_count, last.max_mb, last.orders, last.out_dir) == (2, 5.0, (2, 3), str(tmp_path / "o"))
    assert "give fewer parts" in cluster.run("ngrams.sbatch", "9", *given[1:], status=2, SLURM_ARRAY_TASK_ID="8")
    assert "usage: bash" in cluster.run("ngrams.sh", "1", *given[1:], status=2)
    assert "usage: sbatch" in cluster.run("ngrams.sbatch", status=2)
    for script in ("ngrams.sh", "ngrams.sbatch"):
        assert "~/d*.jsonl: no file matches" in cluster.run(script, "3", "o", "~/d*.jsonl", "tokenizer=t", status=2)
    assert len(cluster.calls("sbatch")) == 2


def test_pipeline(cluster: Cluster) -> None:
    out = cluster.run(
        "pipeline.sh", "target=m", "out_dir=o", "generate.data=ultrachat", "eesd.data=self_distillation",
        "evaluate.prompts=a b.jsonl", EESD_SBATCH="--nodes 2 --gpus-per-node 8",
    )  # fmt: skip
    assert out.split() == ["generate", "101", "eesd", "102", "calibrate", "103", "evaluate", "104"]
    always = ["--parsable", "--job-name=outrider-{}", "--dependency=afterok:{}", "--kill-on-invalid-dep=yes"]
    train = "slurm/train.sbatch"
    responses = ["data=responses", "data.path=o/responses/responses-*.jsonl"]
    expected = [
        ["generate", train, "data_prep/generate_responses.py", "target=m", "out_dir=o/responses", "resume=true",
         "data=ultrachat"],
        ["eesd", "--nodes", "2", "--gpus-per-node", "8", train, "train/eesd.py", "target=m", "out_dir=o/eesd",
         "resume=true", "data=self_distillation", "data.mix.generated.path=o/responses/responses-*.jsonl"],
        ["calibrate", train, "train/calibrate.py", "checkpoint=o/eesd", "out_dir=o/calibrate", "resume=true",
         *responses],
        ["evaluate", "slurm/evaluate.sbatch", "checkpoint=o/eesd", "out_dir=o/evaluate", "resume=true",
         "prompts=a b.jsonl", "method=[eesd_beta,eesd_cali]"],
    ]  # fmt: skip
    for place, (call, (stage, *rest)) in enumerate(zip(cluster.calls("sbatch"), expected, strict=True)):
        options = [option.format(stage if "name" in option else 100 + place) for option in always]
        if place == 0:
            del options[2]
        assert call == [*options, *rest]
        for word in rest:
            assert not word.endswith((".py", ".sbatch")) or (ROOT / word).exists()


def test_the_chat_templates_arguments_reach_all_stages(cluster: Cluster) -> None:
    words = ["generate.data=ultrachat", "generate.data.chat_template_kwargs.enable_thinking=false"]
    cluster.run(
        "pipeline.sh", "target=m", "out_dir=o", *words, "calibrate.data.chat_template_kwargs.enable_thinking=true"
    )
    given = [[word for word in call if "enable_thinking" in word] for call in cluster.calls("sbatch")]
    key = "chat_template_kwargs.enable_thinking"
    assert given == [[f"data.{key}=false"], [f"data.{key}=false"], [f"data.{key}=true"], [f"{key}=false"]]


def test_a_path_is_what_was_typed_whatever_is_in_it(cluster: Cluster) -> None:
    for name in ("a,b (c)=[d]", "it's", "${x}", 'a "b"', "back\\"):
        cluster.record.write_text("")
        cluster.run("pipeline.sh", f"target=./{name}", f"out_dir='o/{name}'")  # as Hydra's value, or as it is
        words = [call[call.index("--kill-on-invalid-dep=yes") + 3 :] for call in cluster.calls("sbatch")]
        answers, drafter = compose_and_build("generate_responses", words[0]), compose_and_build("eesd", words[1])
        assert (answers.target, answers.out_dir) == (f"./{name}", f"o/{name}/responses")
        assert drafter.data.path == (f"o/{name}/responses/responses-*.jsonl",)


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_reads_every_strategy(path: Path) -> None:
    """Loaded with accelerate's own parser, which refuses unknown keys; and the launcher becomes what the name says."""
    load_config_from_file(str(path))
    launch = parsed(["launch", "--config_file", str(path), "s.py"])
    kind = path.stem.partition("_")[0]
    assert launch.multi_gpu == (kind in ("ddp", "multi"))
    assert launch.use_fsdp == (kind == "fsdp")
    assert launch.use_deepspeed == kind.startswith("zero")
    assert launch.mixed_precision == "no"
    if launch.use_deepspeed:
        assert launch.zero_stage == int(kind[-1])
        offload = "cpu" if "offload" in path.stem else "none"
        assert launch.offload_param_device == launch.offload_optimizer_device == offload
    if launch.use_fsdp:
        assert launch.fsdp_version == 2
    assert launch.num_machines == (2 if kind == "multi" else 1)


PROGRAMS = {
    "train/eesd.py": ("eesd", EesdConfig, {"eval_tau"}),
    "slurm/sweep_evaluate.py": ("evaluate_checkpoint", EvaluateConfig, {"speedup", "tau"}),
}


@pytest.mark.parametrize("path", sorted((CONF_DIR / "sweep").glob("*.yaml")), ids=lambda path: path.stem)
def test_sweeps_compose(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value at the edges of a sweep is one that the command takes, and its metric is one that is logged."""
    sweep = yaml.safe_load(path.read_text())
    command, schema, metrics = PROGRAMS[sweep["program"]]
    assert sweep["metric"]["name"] in metrics
    assert sweep["command"][-1] == "${args_no_hyphens}"
    fixed = [re.sub(r"\$\{envvar:(\w+)}", r"\1", word) for word in sweep["command"] if "=" in word]
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    for corner in (0, -1):
        overrides = []
        for key, how in sweep["parameters"].items():
            values = how.get("values") or ([how["value"]] if "value" in how else [how["min"], how["max"]])
            overrides.append(f"{key}={values[corner]}")
        config = build(schema, compose_config(command, [*fixed, *overrides]))
        if "eval_tau" in metrics:
            assert config.decode_prompts > 0
            assert (config.target, config.out_dir) == ("TARGET", "runs/sweep/r1")
            assert (config.data.source, config.data.path) == ("local", ("ANSWERS",))  # not whatever is the default
            assert config.fit.steps >= 2 * config.fit.eval_every
        else:
            assert list(config.methods) == ["eesd_beta"]  # one report
            assert config.prompts == "PROMPTS"


def test_readme_commands_compose() -> None:
    """Of a grid, its first point."""
    commands = written_commands((SLURM / "README.md").read_text().splitlines())
    assert len(commands) >= 6
    for command, overrides in commands:
        compose_and_build(command, [re.sub(r",.*", "", word) for word in overrides if word != "--multirun"])

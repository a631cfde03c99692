"""Every experiment composes without a further word, and its command runs it with debug=true."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from outrider.base.errors import UserError
from outrider.base.wandb_config import WandbConfig
from outrider.commands import CONF_DIR, carry_out
from outrider.commands.composing import build, compose_config, has_gpu, typed_keys_of
from outrider.data_prep.text.settings import DataConfig, MixPart
from outrider.draft_models.targets.settings import TARGET
from outrider.draft_models.tiny.models import save_tiny_model, save_tiny_models, shrink_config
from outrider.inference.loading.rehearsal import MODELS, shrink
from outrider.train.settings.fit import FitConfig
from tests.conf.test_configs import COMMANDS, compose_and_build
from tests.families import FAMILIES, TYPICAL, save_family
from tests.refusals import refusal
from tests.tiers import quick_where, typical_where

EXPERIMENTS = sorted(f"{f.parent.name}/{f.stem}" for f in (CONF_DIR / "experiment").glob("*/*.yaml"))
ANY_MODEL = {"eesd/without_self_distillation", *(name for name in EXPERIMENTS if name.endswith("/demo"))}
LEAVES = {
    "build_trigrams": "table.safetensors",
    "calibrate": "calibration.json",
    "dspark": "dflash.json",
    "eagle3": "eagle3.json",
    "eesd": "drafter.json",
    "evaluate_checkpoint": "report.json",
    "finetune_drafter": "finetune_drafter.json",
    "generate_responses": "responses-00000.jsonl",
}


def composed(name: str, *overrides: str) -> Any:
    command = name.partition("/")[0]
    mandatory = COMMANDS[command][2] if name in ANY_MODEL else []
    return compose_and_build(command, [f"experiment={name}", *mandatory, *overrides])


def run(command: str, config: Any, *words: str) -> None:
    """What the command does with its config, which `words` gave, in this process."""
    carry_out(command, config, typed_keys_of(words))


def test_an_experiment_is_in_the_folder_of_its_command() -> None:
    assert {name.partition("/")[0] for name in EXPERIMENTS} == set(LEAVES)
    assert set(LEAVES) <= set(COMMANDS)  # those in no folder are the pipeline's: tests/train/test_pipeline.py


# Of each command the demo's, or else the one that comes first in the alphabet.
REHEARSED = {
    min((name for name in EXPERIMENTS if name.startswith(f"{command}/")), key=lambda name: (name[-5:] != "/demo", name))
    for command in LEAVES
}


@pytest.mark.parametrize(
    "name", typical_where(REHEARSED.__contains__, quick_where(lambda name: name.endswith("/demo"), EXPERIMENTS))
)
def test_every_experiment_runs_with_debug(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out_dir = tmp_path / "run"
    out_dir.mkdir()
    (out_dir / "mine").write_text("a real run")
    command = name.partition("/")[0]
    config = composed(name, "debug=true", f"out_dir={out_dir}")
    run(command, config)
    debug = tmp_path / "run-debug"
    assert (debug / "run" / LEAVES[command]).exists()
    assert f"debug target={debug / MODELS / TARGET} architecture=llama " in capfd.readouterr().out
    assert [p.name for p in out_dir.iterdir()] == ["mine"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run-debug"]


@pytest.mark.parametrize(("name", "target", "exit_layer", "seq_len", "epochs", "chat"), [
    ("llama2_70b", "meta-llama/Llama-2-70b-hf", 5, 4096, 6, False),
    ("llama2_70b_chat", "meta-llama/Llama-2-70b-chat-hf", 5, 4096, 6, True),
    ("llama2_13b", "meta-llama/Llama-2-13b-hf", 3, 2048, 4, False),
    ("vicuna_13b", "lmsys/vicuna-13b-v1.3", 3, 2048, 4, True),
    ("codellama_13b", "codellama/CodeLlama-13b-hf", 3, 16384, 4, False),
])  # fmt: skip
def test_eesd_is_table_9(name: str, target: str, exit_layer: int, seq_len: int, epochs: int, chat: bool) -> None:
    config = composed(f"eesd/{name}")
    found = (config.target, config.exit_layer, config.seq_len, config.fit.epochs)
    assert found == (target, exit_layer, seq_len, epochs)
    assert (config.fit.lr, config.fit.batch_rows, config.fit.optimizer, config.fit.steps) == (1e-3, 64, "adamw", None)
    assert config.objective == "cross_entropy"
    generated, opened = config.data.mix["generated"], config.data.mix["open"]
    assert opened.layout == ("sharegpt" if chat else "text")
    assert opened.max_records == (None if chat else 100_000)
    told = composed(f"generate_responses/{name}")
    assert told.target == target
    assert generated.path == (f"{told.out_dir}/responses-*.jsonl",)
    head = composed(f"calibrate/{name}")
    assert head.checkpoint == config.out_dir
    for data in (generated, opened, told.data, head.data):  # the chat format that the target was tuned on
        assert data.template == ("vicuna" if name == "vicuna_13b" else "tokenizer")


def test_the_corpora_of_aded() -> None:
    chat, code = composed("build_trigrams/ultrachat"), composed("build_trigrams/the_stack")
    assert (chat.data.layout, chat.data.column, chat.data.max_records, chat.text) == ("turns", "data", 774_000, "all")
    assert (code.data.data_dir, code.data.layout, code.data.max_records) == ("data/python", "code", 2_700_000)
    for config in (chat, code):
        assert (config.orders, config.min_count, config.data.heldout_fraction) == ((3,), 1, 0)


def on(monkeypatch: pytest.MonkeyPatch, gpu: bool, command: str, *overrides: str) -> Any:
    """A config as composed on a machine with or without a GPU."""
    monkeypatch.setattr("outrider.commands.composing.has_gpu", lambda: gpu)
    return build(COMMANDS[command][0], compose_config(command, overrides))


def test_sizes_that_nobody_gives_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given, by a user or by an experiment about a model, is the same everywhere."""
    for command in ("eesd", "finetune_drafter", "eagle3"):
        big, small = (on(monkeypatch, gpu, command, "target=t") for gpu in (True, False))
        assert (big.seq_len, small.seq_len) == (2048, 512)
        assert big.fit.batch_rows >= 4 * small.fit.batch_rows
        given = [on(monkeypatch, gpu, command, "target=t", "seq_len=64", "fit.batch_rows=2") for gpu in (True, False)]
        assert (given[0].seq_len, given[0].fit.batch_rows) == (64, 2)
        assert given[0] == given[1]
    big, small = (
        on(monkeypatch, gpu, "evaluate_checkpoint", "target=t", "method=prompt_lookup") for gpu in (True, False)
    )
    assert (big.num_prompts, small.num_prompts) == (24, 12)
    for name in {*EXPERIMENTS} - ANY_MODEL:
        configs = [on(monkeypatch, gpu, name.partition("/")[0], f"experiment={name}") for gpu in (True, False)]
        assert configs[0] == configs[1], name


def test_a_gpu_is_one_that_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = {"/dev/nvidiactl"}
    monkeypatch.setattr("os.path.exists", found.__contains__)
    assert has_gpu()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not has_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert has_gpu()
    found.clear()
    assert not has_gpu()


@pytest.mark.slow
def test_a_rehearsal_is_repeated_or_resumed_and_deletes_only_its_own(tmp_path: Path) -> None:
    overrides = ["debug=true", f"out_dir={tmp_path / 'run'}"]
    config = composed("generate_responses/llama2_13b", *overrides)
    left = tmp_path / "run-debug" / "run"
    run("generate_responses", config)
    answers = sorted(left.glob("responses-*.jsonl"))
    (left / "rubbish").touch()
    run("generate_responses", composed("generate_responses/llama2_13b", *overrides, "resume=true"))
    assert (left / "rubbish").exists()
    assert sorted(left.glob("responses-*.jsonl")) == answers
    run("generate_responses", config)
    assert not (left / "rubbish").exists()
    foreign = tmp_path / "other-debug"
    foreign.mkdir()
    (foreign / "thesis").touch()
    with pytest.raises(UserError, match=r"other-debug: debug=true runs there, and it holds something else"):
        run(
            "generate_responses",
            composed("generate_responses/llama2_13b", "debug=true", f"out_dir={tmp_path / 'other'}"),
        )
    assert (foreign / "thesis").exists()


TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model, one without a template, one without a tokenizer; conversations, prompts, and no text."""
    folder = tmp_path_factory.mktemp("given")
    for name, template in (("chat", TEMPLATE), ("bare", None), ("mute", TEMPLATE)):
        save_tiny_model(folder / name, shrink_config(Qwen2Config(pad_token_id=0)), template=template)
    (folder / "mute/tokenizer.json").write_text("{}")
    says = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    lines = {"talk": {"messages": says}, "asked": {"turns": ["hi"]}, "odd": {"messages": 3}}
    for name, line in lines.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(line))
    (folder / "nothing.jsonl").write_text('{"text": " "}')
    return folder


@pytest.mark.parametrize(("command", "words", "said"), [
    ("eesd", "target=nobody/nothing", "target=nobody/nothing: .*not to be had from the Hub"),
    ("eesd", "target=HERE/mute", "target=.*mute: no usable tokenizer"),
    ("eesd", "target=HERE/bare data=local data.path=HERE/talk.jsonl", "bare' has no chat template"),
    ("eesd", "target=HERE/chat data=local data.path=HERE/odd.jsonl", r"odd\.jsonl:1: cannot tell the layout"),
    ("eesd", "target=HERE/chat data=local data.path=HERE/nothing.jsonl", "data: no usable record in path="),
    ("generate_responses", "target=HERE/bare data=local data.path=HERE/asked.jsonl", "bare' has no chat template"),
    ("evaluate_checkpoint", "target=HERE/bare method=prompt_lookup prompts=HERE/asked.jsonl", "no chat template"),
    ("build_trigrams", "tokenizer=HERE/talk.jsonl", "talk.jsonl: another kind of file"),
])  # fmt: skip
def test_a_rehearsal_refuses_what_the_run_would(
    given: Path, tmp_path: Path, command: str, words: str, said: str
) -> None:
    options = words.replace("HERE", str(given)).split()
    options += ["debug=true", f"out_dir={tmp_path / 'run'}"]
    refusal(said, run, command, compose_and_build(command, options), *options)
    assert not list(tmp_path.glob("*/run"))


def test_a_rehearsal_is_of_the_targets_architecture(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At tiny size, with what else its config says."""
    described = json.loads((given / "chat/config.json").read_text()) | {
        "rms_norm_eps": 0.125,
        "max_position_embeddings": 4096,
    }
    shutil.copytree(given / "chat", tmp_path / "mine")
    (tmp_path / "mine/config.json").write_text(json.dumps(described))
    words = [f"target={tmp_path / 'mine'}", "data=local", f"data.path={given / 'talk.jsonl'}"]
    words += ["debug=true", f"out_dir={tmp_path / 'run'}"]
    run("eesd", compose_and_build("eesd", words), *words)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run-debug" / MODELS / TARGET)
    tiny = model.config
    assert (tiny.model_type, tiny.rms_norm_eps, tiny.max_position_embeddings) == ("qwen2", 0.125, 256)
    assert (tmp_path / "run-debug/run/drafter.json").exists()


@pytest.mark.parametrize("family", typical_where(TYPICAL.__contains__, sorted(FAMILIES)))
def test_every_family_can_be_made_tiny(family: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(save_family(tmp_path / "target", family))
    assert save_tiny_models(tmp_path / "tiny", config) == config.model_type


def test_impossible_rehearsals_fail_with_their_key() -> None:
    cached = ["data=local", "data.path=x", "teacher=cached", "objective=forward_kl"]
    assert composed("finetune_drafter/vicuna_68m", *cached).teacher == "cached"
    refusal("debug=True: expected teacher=online", composed, "finetune_drafter/vicuna_68m", *cached, "debug=true")


def test_what_is_small_keeps_its_kind() -> None:
    debug, models = Path("run-debug"), Path("run-debug/tiny_models")
    for given in (None, 32000):
        config = composed("eesd/llama2_13b", f"draft_vocabulary={given or 'null'}")
        assert shrink(config, debug, models).draft_vocabulary == (given and 64)
    part = MixPart(source="hub", path="x", template="vicuna", weight=3)
    data = DataConfig(source="mix", mix={"a": part, "b": MixPart(weight=0)}, heldout_fraction=0.1)
    text = shrink(replace(config, data=data), debug, models).data
    assert [(name, weight, own.source) for name, weight, own in text.parts()] == [("a", 3, "python_stdlib")]
    assert text.cache == Path("run-debug/cache")
    online = WandbConfig(mode="online")
    fit = shrink(FitConfig(epochs=6, batch_rows=16, warmup=500, optimizer="muon", wandb=online), debug, models)
    assert (fit.steps, fit.epochs, fit.warmup, fit.wandb.mode) == (2, None, 2, "disabled")
    assert (fit.batch_rows, fit.optimizer) == (16, "muon")

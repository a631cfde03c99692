"""refit: a drafter is continued on recent traffic, and the new one is kept only if it drafts better there."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.base.errors import UserError
from outrider.base.files import read_mapping, write_json
from outrider.base.streams import Streams
from outrider.commands import config_for
from outrider.data_prep.text.settings import DataConfig, MixPart
from outrider.data_prep.text.traffic import Conversation, read_traffic, split_newest
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.vocabulary import vocabulary_digest
from outrider.inference.core.decode import speculative
from outrider.inference.core.rounds import collect
from outrider.inference.loading.drafters import new_drafter
from outrider.inference.measure import replay
from outrider.inference.settings.kinds import KINDS, kind_in
from outrider.inference.settings.method import preset
from outrider.train import refit as refitting
from outrider.train.dspark import train_dspark
from outrider.train.eagle3 import train_eagle3
from outrider.train.refit import refit
from tests.faults import plant
from tests.refusals import refusal
from tests.tiny import byte_tokenizer, open_stack, reference_generate, save_exit
from tests.train.jobs import heading, sparking
from tests.train.test_pipeline import printed_by

FIT = ["training.fit.epochs=null", "training.fit.steps=80", "training.fit.lr=1e-2", "training.fit.precision=fp32",
       "training.fit.wandb.mode=disabled", "training.fit.batch_rows=4"]  # fmt: skip
WORDS = [*FIT, "training.seq_len=64", "training.decode_prompts=1", "training.decode_tokens=4",
         "training.objective=cross_entropy", "minutes=null", "template=none"]  # fmt: skip
ANSWER = "the quick brown fox jumps over the lazy dog"


def turn(number: int, answer: str = ANSWER, **fields: Any) -> dict[str, Any]:
    question = {"role": "user", "content": f"question {number}: "}
    return {"messages": [question, {"role": "assistant", "content": answer}], "created": 1000 + number, **fields}


def write_log(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "traffic.jsonl", [turn(number) for number in range(40)])


@pytest.fixture
def run(target: Path, small: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run refit with more words; returns what it prints. Its training runs in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*more: str, drafter: Path = small) -> str:
        words = [f"checkpoint={drafter}", f"target={target}", f"logs={log}", f"out_dir={tmp_path}/out", *WORDS, *more]
        return printed_by(lambda: refit(config_for("train/refit.py", words)))

    return call


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def result_of(out: Path, version: int = 1) -> dict[str, Any]:
    return read_mapping(out / f"versions/{version:04}/refit.json", "record", "")


def test_what_drafts_better_becomes_current_and_one_word_goes_back(run: Any, small: Path, tmp_path: Path) -> None:
    """The drafter given stays as it is; the next refit continues the current one."""
    before, out = digests(small), tmp_path / "out"
    made = out / "versions/0001/drafter"
    printed = run()
    result = result_of(out)
    assert result["before"] < 1.5 < 3 < result["after"]
    assert 0 < result["gain"][0] <= result["after"] - result["before"] <= result["gain"][1]
    assert (out / "current").resolve() == made.resolve()
    assert kind_in(str(out / "current")) == KINDS["small_lm"]
    assert digests(small) == before
    assert f"v1/drafter -H 'Content-Type: application/json' -d '{json.dumps({'checkpoint': str(made)})}'" in printed
    again = run("training.fit.steps=1", "training.fit.lr=1e-12")
    assert f"start={made}" in again
    assert "the drafter stays" in again
    second = result_of(out, 2)
    assert (second["gain"], second["before"]) == ([0.0, 0.0], result["after"])
    assert (out / "current").resolve() == made.resolve()
    assert str(small) in run("back=true")
    assert (out / "current").resolve() == small.resolve()
    with pytest.raises(UserError, match="nothing to go back to"):
        run("back=true")
    refusal("of which .* has versions", run, drafter=out / "versions/0001/drafter")


def test_a_worse_drafter_is_not_kept(run: Any, tmp_path: Path, log: Path) -> None:
    """What it learns, the newest conversations do not have."""
    run()
    old, new = (
        [turn(number, "zyxwvutsrqponmlkjihgfedcba" * 2) for number in range(60)],
        [turn(100 + n) for n in range(8)],
    )
    write_log(log, [*old, *new])
    printed = run("heldout_share=0.1")
    result = result_of(tmp_path / "out", 2)
    assert result["gain"][1] < 0
    assert result["after"] < result["before"]
    assert "kept=False" in printed
    assert (tmp_path / "out/current").resolve().parent.name == "0001"


def test_the_newest_first_turns_are_held_out() -> None:
    """They are as old as the first conversation that begins with them."""
    conversations = [Conversation(first_turn, {}) for first_turn in [*map(str, range(10)), "0", "9"]]
    older, newest = split_newest(conversations, 0.3)
    assert [c.first_turn for c in newest] == ["7", "8", "9", "9"]
    assert [c.first_turn for c in older] == [*map(str, range(7)), "0"]


def test_logs_of_all_layouts_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    question = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "a"}
    asked = {"request": {"messages": [question, answer, {"role": "user", "content": "more"}], "temperature": 0}}
    response = {"response": {"created": 5, "choices": [{"message": answer, "finish_reason": "length"}]}}
    text = {"text": "a text", "created": 9}
    file = write_log(tmp_path / "a.jsonl", [text, asked | response, turn(-1000, created=0)])
    conversations = read_traffic([str(file)])
    assert [conversation.raw["created"] for conversation in conversations] == [0, 5, 9]
    joined = conversations[1].raw
    assert [message.get("weight") for message in joined["messages"]] == [None, 0, None, None]
    assert (joined["finish"], joined["greedy"]) == ("length", True)


def test_a_logged_response_without_a_message_is_left_out_and_tools_stay(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = {"message": {"role": "assistant", "content": "a"}}
    lines = [{"request": asked, "response": {"choices": [choice]}} for choice in (answer, {"text": "a"}, "a")]
    lines.append({"request": {"messages": ["hi"]}, "response": {"choices": [answer]}})
    [conversation] = read_traffic([str(write_log(tmp_path / "a.jsonl", lines))])
    assert conversation.raw["tools"] == asked["tools"]


def test_versions_may_be_moved(tmp_path: Path) -> None:
    for number, start in ((1, "small"), (2, f"{tmp_path}/old/versions/0001/drafter")):
        folder = tmp_path / f"new/versions/{number:04}"
        (folder / "drafter").mkdir(parents=True)
        write_json(folder / "plan.json", asdict(refitting.Version({}, start, "none", {})))
    starts = [refitting.read_version(tmp_path / f"new/versions/{number:04}").start for number in (1, 2)]
    assert starts == ["small", str(tmp_path / "new/versions/0001/drafter")]


def test_conversations_are_rendered_as_the_training_rendered_them() -> None:
    """Also where they were one source of several."""
    thinking = {"enable_thinking": False}
    chat = MixPart(source="local", path="a.jsonl", chat_template_kwargs=thinking)
    mixed = DataConfig(source="mix", mix={"chat": chat, "code": MixPart()})
    alone = DataConfig(source="local", path="a.jsonl", chat_template_kwargs=thinking)
    for data in (mixed, alone):
        [source] = refitting.sources_in(json.loads(json.dumps(data.decisions())))
        assert (source.template, source.chat_template_kwargs) == ("tokenizer", thinking)
    assert refitting.sources_in(None) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "traffic.jsonl:3: "), ('{"prompt": "no answer"}', "traffic.jsonl:3: "), ("7", "traffic.jsonl:3: "),
     ('{"messages": [{"role": "user", "content": "q"}]}', "traffic.jsonl:3: .*with an answer"),
     ('{"request": {"messages": []}, "response": {"error": "x"}}', "traffic.jsonl:3: ")],
)  # fmt: skip
def test_a_bad_line_is_refused_before_anything_is_trained(
    run: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], line, *lines[2:]]))
    refusal(words, run)
    assert not [*(tmp_path / "out").rglob("checkpoint-*")]
    log.write_text("\n".join(lines[:4]))
    refusal("expected some to learn from .* newer first turns", run)
    log.write_text("\n".join(lines))
    refusal("training.seq_len|seq_len", run, "training.seq_len=0")
    refusal("no such option", run, "training.nothing=1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refusal("started as several processes", run)


def test_a_killed_refit_goes_on_with_its_traffic(
    run: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was stopped; its result is that of a refit that was not."""
    run(f"out_dir={tmp_path}/whole")
    expected = result_of(tmp_path / "whole")
    for owner, name in ((refitting, "compare"), (refitting.steps, "run_step"), (refitting, "write_json")):
        with monkeypatch.context() as patch:
            calls = iter([True])
            real = getattr(owner, name)

            def stop(*values: Any, real: Any = real, calls: Any = calls) -> Any:
                if next(calls, False):
                    raise KeyboardInterrupt
                return real(*values)

            patch.setattr(owner, name, stop)
            with pytest.raises(KeyboardInterrupt):
                run(f"out_dir={tmp_path}/{name}")
        if name != "write_json":  # the plan was not yet written: nothing is begun
            refusal("0001 is not finished; resume=true", run, f"out_dir={tmp_path}/{name}")
            write_log(log, [turn(number, "other words") for number in range(40)])
            refusal("resume=true: .*seed=3", run, f"out_dir={tmp_path}/{name}", "resume=true", "seed=3")
        run(f"out_dir={tmp_path}/{name}", "resume=true")
        write_log(log, [turn(number) for number in range(40)])
        assert result_of(tmp_path / name) == expected
        assert "kept=True" in run(f"out_dir={tmp_path}/{name}", "resume=true")  # finished already
        assert len([*(tmp_path / name / "versions").iterdir()]) == 1


def test_a_training_that_failed_may_have_other_options(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few conversations enough are held out; an option of the data keeps the others."""
    with monkeypatch.context() as patch:
        patch.setattr(refitting.steps, "run_step", raise_refusal)
        with pytest.raises(UserError, match="out of memory"):
            run("training.fit.lr=1e-3")
    assert "kept=True" in run("resume=true", "training.data.cache_dir=null")
    record = tmp_path / "out/versions/0001/drafter/finetune_drafter.json"
    assert read_mapping(record, "record", "")["settings"]["data"]["heldout_fraction"] == pytest.approx(8 / 32)


def raise_refusal(*_: Any) -> None:
    raise UserError("out of memory")


def test_versions_may_be_removed_and_a_drafter_that_is_gone_is_told(run: Any, small: Path, tmp_path: Path) -> None:
    out, moved = tmp_path / "out", tmp_path / "moved"
    shutil.copytree(small, tmp_path / "first")
    run(drafter=tmp_path / "first")
    for name in ("0002", "0003"):
        shutil.copytree(out / "versions/0001", out / f"versions/{name}")
    shutil.rmtree(out / "versions/0002")
    assert refitting.find_folder(out, resume=False) == out / "versions/0004"
    (tmp_path / "first").rename(moved)
    refusal("the drafter before it, .*first, is gone", run, "back=true")
    assert "version=0004" in run("training.fit.steps=1", drafter=out / "current")
    assert "version=0004" in run("resume=true", drafter=out / "current")
    (out / "current").unlink()
    (out / "current").symlink_to("versions/0009/drafter")
    moved.rename(tmp_path / "first")
    refusal("names versions/0009/drafter, which is gone", run, drafter=tmp_path / "first")


@pytest.mark.slow
def test_a_table_counts_each_conversation_once(run: Any, target: Path, log: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    digest = vocabulary_digest(tokenizer.get_vocab())
    old = [[*tokenizer.encode("an old text of the corpus", add_special_tokens=False)]]
    TrigramTable.from_documents(old, [2, 3], 260, digest, corpus={}).save(tmp_path / "table")
    words = [word for word in WORDS if not word.startswith("training")]
    table = [f"checkpoint={tmp_path}/table", f"target={target}", f"logs={log}", f"out_dir={tmp_path}/out", *words,
             "training.workers=1"]  # fmt: skip

    def call(*more: str) -> str:
        return printed_by(lambda: refit(config_for("train/refit.py", [*table, *more])))

    def texts(count: int) -> list[list[int]]:
        ids = tokenizer.encode(ANSWER, add_special_tokens=False)
        return [[*ids, tokenizer.eos_token_id]] * count

    assert "kept=True" in call()
    write_log(log, [turn(number) for number in range(60)])
    call()
    for version, count in ((1, 32), (2, 48)):
        made = TrigramTable.open(tmp_path / f"out/versions/{version:04}/drafter")
        expected = TrigramTable.from_documents([*old, *texts(count)], [2, 3], 260, digest)
        for order in (2, 3):
            counted, right = made.levels[order].grams(), expected.levels[order].grams()
            assert [array.tolist() for array in counted] == [array.tolist() for array in right]


def weights_of(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.glob("*.safetensors")]


def test_a_small_lm_needs_only_the_tokenizer_of_its_target(run: Any, target: Path, log: Path, tmp_path: Path) -> None:
    """The weights may be elsewhere. Layers of the target are not drafted with then."""
    folder = tmp_path / "tokenizer"
    byte_tokenizer().save_pretrained(folder)
    run("target=null", f"tokenizer={folder}")
    result = result_of(tmp_path / "out")
    assert result["before"] < 1.5 < 3 < result["after"]
    save_exit(tmp_path / "exit", target, 2)
    words = ("target=null", f"tokenizer={folder}", f"out_dir={tmp_path}/other")
    refusal("tokenizer=.*reads layers", run, *words, drafter=tmp_path / "exit")
    refusal("target: missing", run, "target=null", f"out_dir={tmp_path}/other")
    byte_tokenizer("{{ raise_exception('no such talk') }}").save_pretrained(folder)
    refusal("left out 8: .*no such talk", run, *words, "template=tokenizer")


def shaken(model: Path, folder: Path) -> Path:
    """A small LM that drafts some of the tokens of `model`."""
    lm, generator = AutoModelForCausalLM.from_pretrained(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    lm.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_the_tau_is_that_of_decoding_with_the_target(
    run: Any, target: Path, small: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the answers are the target's greedy ones."""
    model, stack = open_stack(target)
    answers = []
    for number in range(8):
        text = f"question {number}: "
        prompt = byte_tokenizer().encode(text)
        answers.append(refitting.Answer(text, prompt, reference_generate(model, prompt, 20)))
    monkeypatch.setattr(refitting, "read_answers", lambda *_: iter(answers))
    drafter = shaken(target, tmp_path / "drafter")
    run("training.fit.steps=1", drafter=drafter)
    opened = open_target(str(target))
    kind, method = KINDS["small_lm"], preset("small_lm/fixed")
    loaded = kind.load_plugin().load(str(drafter), opened, {}, dtype=stack.dtype, device="cpu")
    rounds = 0
    for _, prompt, _ in answers:
        made = speculative(stack, new_drafter(method, {"small_lm": loaded}, Streams(0)), prompt, max_new_tokens=20)
        rounds += len(collect(made).rounds)
    assert 8 * 19 / rounds > 1.2
    assert result_of(tmp_path / "out")["before"] == pytest.approx(8 * 19 / rounds)
    plant(monkeypatch, replay.RecordedSelector, "_after", "self._position + depth", "self._position")
    run("training.fit.steps=1", f"out_dir={tmp_path}/wrong", drafter=drafter)
    assert result_of(tmp_path / "wrong")["before"] != pytest.approx(8 * 19 / rounds)


@pytest.mark.parametrize("kind", ["early_exit", "eagle3", "dspark"])
def test_drafters_with_layers_of_the_target_are_continued_too(
    run: Any, target: Path, corpus: DataConfig, tmp_path: Path, kind: str
) -> None:
    """An early exit names its target, and keeps its layer; a head keeps its shape."""
    start = tmp_path / "start"
    if kind == "early_exit":
        save_exit(start, target, 2, noise=2.0)
    elif kind == "eagle3":
        train_eagle3(heading(target, corpus, start))
    else:
        train_dspark(sparking(target, corpus, start, draft_vocabulary=None))
    run("target=null" if kind == "early_exit" else "training.frozen_dtype=float32", drafter=start)
    result, made = result_of(tmp_path / "out"), tmp_path / "out/current"
    assert result["before"] < 1.5 < 2.5 < result["after"]
    shapes = [{name: tensor.shape for name, tensor in load_file(path).items()} for path in weights_of(start, made)]
    assert shapes[0] == shapes[1]

"""Calibration: what is captured, the checkpoint of a head, the command."""

import functools
import itertools
import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from data_prep.text.settings import DataConfig
from draft_models.calibration import META_FILE, WEIGHTS_FILE, load_calibration, save_calibration
from draft_models.calibration_head import CalibrationHead
from draft_models.early_exit.checkpoint import read_meta, save_pretrained
from draft_models.targets.architectures import load_config
from draft_models.targets.fingerprint import fingerprint_target
from draft_models.targets.open_target import load_tokenizer
from draft_models.targets.settings import HEAD_FOLDER, TARGET, ReadingChanges
from draft_models.targets.tensor_files import TensorFiles, open_tensors
from inference.core.decode import autoregressive, speculative
from inference.core.drafter import DraftModel
from inference.drafters.eagle3 import Eagle3Source
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import ModelDrafter
from inference.drafters.small_lm import SmallLMSource
from inference.evaluate.compare import evaluate
from inference.measure.time_limit import TimeLimit, spread_order
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS
from inference.shapes.factory import Chain
from inference.stopping.plain import FixedLength
from outrider import preset
from outrider.errors import UserError
from outrider.processes import join_processes
from tests.fitted_heads import fitted_head
from tests.tiny import LAYERS, byte_tokenizer, make_drafter, open_stack, random_prompt, save_target
from tests.train.jobs import CALIBRATING as FIT
from tests.train.jobs import calibrating, interrupted_at, kill_when, launch, save_for_calibration, synthetic
from train.parts import capture as capturing
from train.parts.calibration_scores import brier, later_half, predict
from train.parts.capture import Drafting, Text, capture, capture_shards, only_tested, own_shards
from train.recipes import calibration
from train.recipes.calibration import calibrate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_for_calibration(tmp_path_factory.mktemp("calibrate"))


def drafting(kind: str, path: Path, prompt: list[int]) -> tuple[Callable[[], DraftModel], Callable[..., torch.Tensor]]:
    """A drafter for the target in `path`, sometimes right after `prompt`, and its output head."""
    if kind == "early_exit":
        drafter = make_drafter(path, LAYERS - 1, noise=0.1)
        return lambda: EarlyExitSource(drafter), drafter.logits
    _, stack = open_stack(path)
    if kind == "eagle3":
        answer = [token for r in autoregressive(stack, prompt, max_new_tokens=30) for token in r.tokens]
        head = fitted_head(stack, [(prompt, answer)])
        return lambda: Eagle3Source(head), head.logits
    generator = torch.Generator().manual_seed(5)
    for parameter in stack.layers[-1].parameters():
        if parameter.ndim == 2:
            parameter.data += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return lambda: SmallLMSource(stack), stack.logits


@pytest.mark.parametrize("kind", ["early_exit", "small_lm", "eagle3"])
def test_what_is_captured_is_what_happened(tmp_path: Path, kind: str) -> None:
    """Every tested token, in order, with its outcome; hidden states and confidence are those of plain decoding."""
    path, prompt = save_target(tmp_path / "target"), random_prompt(12)
    _, stack = open_stack(path)
    draft_model, logits_of = drafting(kind, path, prompt)
    got = capture(Drafting(lambda: partial(speculative, stack), draft_model, 30), [Text(prompt)], 4)

    labels: list[float] = []
    positions: list[int] = []
    rounds = list(speculative(stack, ModelDrafter(draft_model(), Chain(FixedLength(4))), prompt, max_new_tokens=30))
    for r in rounds[1:]:
        tested = min(r.accepted + 1, r.drafted)
        labels += [1.0] * r.accepted + [0.0] * (tested - r.accepted)
        positions += range(1, tested + 1)
    assert got["position"].tolist() == positions
    assert got["label"].tolist() == labels
    assert 0 < sum(labels) < len(labels)
    # The drafter's head on the captured state gives the captured confidence.
    logits = logits_of(got["draft_hidden"])
    torch.testing.assert_close(logits.softmax(-1).max(-1).values, got["confidence"])
    # The target's head on the state of each round's first token gives the token under which the round drafted.
    first = got["target_hidden"][got["position"] == 1]
    assert stack.logits(first[None])[0].argmax(-1).tolist() == [r.tokens[-1] for r in rounds[:-1]][: len(first)]


def test_whole_rounds_are_captured_with_what_nobody_tested(tmp_path: Path) -> None:
    path = save_target(tmp_path / "target")
    _, stack = open_stack(path)
    prompt = random_prompt(12)
    draft_model, _ = drafting("early_exit", path, prompt)
    given = Drafting(lambda: partial(speculative, stack), draft_model, 30), [Text(prompt)], 4
    part, whole = (capture(*given, all_of_it) for all_of_it in (False, True))
    assert len(whole["label"]) > len(part["label"])
    kept = only_tested(whole)
    assert all(torch.equal(kept[name], part[name]) for name in part)
    assert all((whole["position"].diff() == 1) | (whole["position"][1:] == 1))


def test_every_shard_is_somebodys_whenever_they_look(tmp_path: Path) -> None:
    assert own_shards(tmp_path, 60, 0, 1) == [8 * index for index in spread_order(8)]  # wherever time cuts them
    everybody = [own_shards(tmp_path, 60, process, 3) for process in range(3)]
    assert sorted(start for mine in everybody for start in mine) == list(range(0, 60, 8))
    (tmp_path / f"{everybody[0][0]:06d}.safetensors").touch()  # before the others look
    assert [own_shards(tmp_path, 60, process, 3) for process in range(3)] == [everybody[0][1:], *everybody[1:]]


def test_texts_are_continued_until_the_time_is_over(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Three shards of each kind, ten seconds a look: two before and after every one. A resumed run has no more time."""
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(capturing, "TimeLimit", functools.partial(TimeLimit, clock=lambda: next(seconds)))
    monkeypatch.setattr(capturing, "capture", lambda *_: synthetic(40, 0))
    made = calibrating(folder, tmp_path, prompts=24, heldout_prompts=24, minutes=1, plan=False)
    state, limit = join_processes(), capturing.TimeLimit(0.5)
    prompts, left = [Text([1])] * 24, tmp_path / "left"
    drafting = Drafting(lambda: None, None, 24)  # type: ignore[arg-type]
    for shards in (["000000", "000016"], ["000000", "000016"]):
        left.mkdir(exist_ok=True)
        capture_shards(made, left, prompts, drafting, state, limit)
        assert sorted(path.stem for path in left.glob("*.safetensors")) == shards
    capture_shards(made, left, prompts, drafting, state, TimeLimit(None))
    assert len(list(left.glob("*.safetensors"))) == 3


@pytest.mark.parametrize("seconds", [1, 4, 25])
def test_a_machine_that_becomes_slow_ends_in_time(folder: Path, tmp_path: Path, monkeypatch, seconds: float) -> None:
    """Twice as slow from the middle on: a shard ends with the time too, and held-out texts have what the others left.

    At least one text of either kind there is; each here is long enough.
    """
    now, texts, real = 0.0, 0, calibration.speculative

    def slow(*given: Any, **options: Any) -> Any:
        nonlocal now, texts
        now, texts = now + seconds * (1 if now < 30 else 2), texts + 1
        return real(*given, **options)

    def fit(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(capturing, "TimeLimit", functools.partial(TimeLimit, clock=lambda: now))
    monkeypatch.setattr(calibration, "speculative", slow)
    monkeypatch.setattr("train.core.driver.fit", fit)
    with pytest.raises(KeyboardInterrupt):
        calibrate(calibrating(folder, tmp_path, minutes=1, new_tokens=60))
    assert now <= 1.1 * 60 + 2 * seconds
    assert texts == 26 if seconds == 1 else 2 <= texts < 26
    assert len(list((tmp_path / "captured").glob("*/*.safetensors"))) >= 2


def test_a_resumed_run_learns_from_the_texts_that_there_was_time_for(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Two shards of three to learn from: 30 s of 35 are on record when a look at 40 s ends it. The one of held-out."""
    now, tick, taken, identities = [0.0], [10.0], list[int](), list[dict[str, Any]]()

    def clock() -> float:
        now[0] += tick[0]
        return now[0]

    def capture(_: Drafting, prompts: list[Text], *__: int) -> dict[str, torch.Tensor]:
        taken.append(len(prompts))
        return synthetic(40, 0)

    def fit(*_: object, identity: dict[str, Any], **__: object) -> None:
        identities.append(identity)
        raise KeyboardInterrupt

    monkeypatch.setattr(capturing, "TimeLimit", functools.partial(TimeLimit, clock=clock))
    monkeypatch.setattr(capturing, "capture", capture)
    monkeypatch.setattr("train.core.driver.fit", fit)
    run = calibrating(folder, tmp_path, prompts=20, heldout_prompts=6, minutes=35 / 60 * 26 / 20, resume=True)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            calibrate(run)
        assert taken == [8, 4, 6]
        tick[0] = 0.0  # as if the other run had been killed and this one took no time
    assert identities[0] == identities[1]
    with pytest.raises(KeyboardInterrupt):
        calibrate(replace(run, minutes=2.0))  # goes on
    assert taken == [8, 4, 6, 8]
    (tmp_path / "checkpoint-3").mkdir()  # something was learned from them: it goes on with those
    next((tmp_path / "captured").glob("train-*/000008.safetensors")).unlink()
    for minutes in (9.0, None):
        with pytest.raises(KeyboardInterrupt):
            calibrate(replace(run, minutes=minutes))
        assert taken == [8, 4, 6, 8]
    assert identities[-1] == identities[-2] != identities[-3]


@pytest.mark.slow
def test_the_command_learns_stores_and_serves(folder: Path, tmp_path: Path) -> None:
    calibrate(calibrating(folder, tmp_path / "run"))
    sha = read_meta(folder / "drafter").weights_sha256
    head = load_calibration(folder / "drafter", sha)
    facts = json.loads((folder / "drafter" / META_FILE).read_text())
    assert facts["heldout"]["predictors"].keys() == {"head", "constant", "confidence"}
    assert facts["heldout"] == json.loads((tmp_path / "run/calibration.json").read_text())
    assert (tmp_path / "run/reliability.png").read_bytes().startswith(b"\x89PNG")
    assert float(head.target.abs().sum()) > 0
    tokens = {
        split: sum(
            len(load_file(file)["label"]) for file in (tmp_path / "run/captured").glob(f"{split}-*/*.safetensors")
        )
        for split in ("train", "heldout")
    }
    assert tokens["heldout"] >= facts["heldout"]["tokens"] != tokens["train"] == facts["examples"]
    assert facts["heldout"]["survival"]["rounds"] > 0
    assert facts["format"] == 2
    # What is said is of the head that is stored, on the rounds that its temperatures were not fitted on.
    shards = [load_file(file) for file in sorted((tmp_path / "run/captured").glob("heldout-*/*.safetensors"))]
    heldout = only_tested(later_half({name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}))
    said = facts["heldout"]["predictors"]["head"]["brier"]
    assert said == pytest.approx(brier(predict(head, heldout), heldout["label"]), rel=1e-4)
    assert facts["heldout"]["tokens"] == len(heldout["label"])

    with pytest.raises(UserError, match="belongs to an earlier training"):
        load_calibration(folder / "drafter", "0" * 64)
    blob = (folder / "drafter" / WEIGHTS_FILE).read_bytes()
    (folder / "drafter" / WEIGHTS_FILE).write_bytes(blob[:-4])
    with pytest.raises(UserError, match="truncated or altered"):
        load_calibration(folder / "drafter", sha)
    (folder / "drafter" / WEIGHTS_FILE).write_bytes(blob)
    (folder / "drafter" / META_FILE).write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        load_calibration(folder / "drafter", sha)
    save_calibration(folder / "drafter", head, sha, facts)


def test_the_papers_head_learns_of_the_same_drafts_and_says_that_it_is(folder: Path, tmp_path: Path) -> None:
    """odds decides nothing of what is captured; the checkpoint says which head it is, and what it decodes with."""
    stored, heads, drafts = shutil.copytree(folder / "drafter", tmp_path / "drafter"), {}, set()
    for odds in (True, False):
        run = tmp_path / f"run_{odds}"
        calibrate(replace(calibrating(folder, run), checkpoint=str(stored), odds=odds))
        assert json.loads((stored / META_FILE).read_text())["odds"] is odds
        heads[odds] = load_calibration(stored, read_meta(stored).weights_sha256)
        drafts.add(tuple(file.read_bytes() for file in sorted((run / "captured").glob("*/*.safetensors"))))
    assert len(drafts) == 1
    assert float(heads[True].odds) != 0 == float(heads[False].odds)
    assert heads[False].temperature.tolist() == [1.0] * 10
    assert float(heads[False].target.abs().sum()) > 0


@pytest.mark.parametrize(("name", "method"), [("small_lm", "small_lm/calibrated"), ("eagle3", "eagle3/calibrated")])
def test_a_head_of_a_drafter_that_other_engines_read(
    folder: Path, tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    """It leaves their files alone, decodes losslessly, and is refused before weights are read: missing, or old."""
    drafter, target = shutil.copytree(tiny_models / name, tmp_path / name), str(tiny_models / TARGET)
    shutil.rmtree(drafter / HEAD_FOLDER)
    before = {file: file.read_bytes() for file in drafter.iterdir()}
    config = EvaluateConfig(
        checkpoint=str(drafter), target=target, methods={"m": preset(method)}, max_new_tokens=12,
        prompt_text=["the quick"], device="cpu", compare_transformers=False, out_dir=str(tmp_path / "report"),
    )  # fmt: skip

    def refused(why: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(TensorFiles, "read", None)
            with pytest.raises(UserError, match=f"{why}.*; run outrider calibrate checkpoint"):
                evaluate(config)

    refused("no calibration head there")
    run = calibrating(
        folder, tmp_path / "run", checkpoint=str(drafter), target=target, prompts=8, heldout_prompts=4, new_tokens=12
    )
    calibrate(run)
    assert {file: file.read_bytes() for file in before} == before
    digest = KINDS[name].load_plugin().digest(str(drafter))
    head = load_calibration(drafter, digest, folder=HEAD_FOLDER)
    assert float(head.draft.abs().sum()) > 0
    evaluate(config)
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] == 1
    calibrate(replace(run, resume=True))
    again = load_calibration(drafter, digest, folder=HEAD_FOLDER)
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in head.state_dict().items())

    weights = load_file(drafter / "model.safetensors")
    changed = {key: 2 * tensor if tensor.ndim == 2 else tensor for key, tensor in weights.items()}
    (drafter / "model.safetensors").write_bytes(save(changed, metadata={"format": "pt"}))
    refused("its calibration head belongs to an earlier training")


def test_a_head_is_bound_to_how_its_drafter_is_read(tiny_models: Path) -> None:
    plugin, where = KINDS["eagle3"].load_plugin(), str(tiny_models / "eagle3")
    otherwise = ReadingChanges(norm_output=True)
    assert plugin.reading(ReadingChanges()).digest(where) == plugin.digest(where)
    assert plugin.reading(otherwise).digest(where) != plugin.digest(where)


def test_bad_input_is_refused_before_anything_is_captured(folder: Path, tiny_models: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=1)
    bad: dict[str, dict[str, Any]] = {
        "new_tokens=256: expected less than the context of 256": {"new_tokens": 256},
        "nowhere: no drafter there; expected .* eagle3 .*Hub: hf download": {"checkpoint": str(tmp_path / "nowhere")},
        "was trained for": {"target": str(other)},
        "ngrams has no hidden states": {"checkpoint": str(tiny_models / "table")},
        "target=null: expected the model .*small_lm": {"checkpoint": str(tiny_models / "small_lm")},
        r"reading.norm_output=true: expected nothing": {"reading": ReadingChanges(norm_output=True)},
    }
    for message, changes in bad.items():
        with pytest.raises(UserError, match=message):
            calibrate(calibrating(folder, tmp_path / "run", **changes))
        assert not (tmp_path / "run" / "captured").exists()


def test_another_template_than_the_drafters_is_warned_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(folder / "target", tmp_path / "target"))
    byte_tokenizer("{{ messages }}").save_pretrained(path)
    fingerprint = fingerprint_target(open_tensors(str(path)), load_config(str(path)), load_tokenizer(str(path)))
    talk = DataConfig(source="local", path="chat.jsonl", template="vicuna")
    record = {"data": json.loads(json.dumps(talk.deciding()))}
    drafter = make_drafter(path, LAYERS - 1)
    save_pretrained(tmp_path / "drafter", drafter, fingerprint, record, torch.float32)
    for data, warned in (
        (replace(talk, template="tokenizer"), True),
        (talk, False),
        (replace(talk, layout="text"), False),
    ):
        with pytest.raises(UserError, match="new_tokens=256: expected less"):
            calibrate(calibrating(tmp_path, tmp_path / "run", data=data, new_tokens=256))
        said = f"warning: data.template=tokenizer: the drafter in {tmp_path}/drafter learned by vicuna"
        assert (said in capsys.readouterr().err) == warned


def test_a_head_is_found_beside_its_drafter_only(tmp_path: Path) -> None:
    tmp_path.joinpath("d").mkdir()
    save_calibration(tmp_path / "d", CalibrationHead(4, 4), "a" * 64, {})
    assert load_calibration(tmp_path / "d", "a" * 64).target.shape == (10, 4)
    with pytest.raises(UserError, match="no calibration head there"):
        load_calibration(tmp_path, "a" * 64)


@pytest.mark.slow
def test_captured_is_what_these_settings_ask_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out text apart from the other, as much of it as leaves room; again for other settings, text or drafter."""
    texts: list[tuple[int, ...]] = []
    identities: list[dict[str, Any]] = []

    def capture(_: Drafting, prompts: list[Text], *__: int) -> dict[str, torch.Tensor]:
        texts.extend(tuple(text.prompt) for text in prompts)
        n = len(prompts)
        labels = torch.tensor([float(sum(text.prompt) % 2) for text in prompts])
        hidden = {"target_hidden": torch.zeros(n, 4), "draft_hidden": torch.zeros(n, 4)}
        return {**hidden, "position": torch.ones(n).long(), "confidence": torch.ones(n), "label": labels}

    def fit(*_: object, identity: dict[str, Any], **__: object) -> None:
        identities.append(identity)
        raise KeyboardInterrupt

    monkeypatch.setattr(capturing, "capture", capture)
    monkeypatch.setattr("train.core.driver.fit", fit)
    run = calibrating(folder, tmp_path / "run", resume=True)

    def captured(**changes: object) -> int:
        texts.clear()
        with pytest.raises(KeyboardInterrupt):
            calibrate(replace(run, **changes))
        return len(texts)

    assert captured() == 20 + 6
    assert not set(texts[:20]) & set(texts[20:])
    assert captured() == 0
    assert captured(max_draft=3) == captured(new_tokens=12) == captured(dtype="float64") == 26
    assert captured(new_tokens=250) == 26
    assert max(map(len, texts)) == 256 - 250
    path = folder / "target"
    fingerprint = fingerprint_target(open_tensors(str(path)), load_config(str(path)), load_tokenizer(str(path)))
    save_pretrained(tmp_path / "other", make_drafter(path, LAYERS - 1, noise=0.2), fingerprint, {}, torch.float32)
    assert captured(checkpoint=str(tmp_path / "other")) == 26
    (tmp_path / "text.jsonl").write_text((folder / "text.jsonl").read_text().replace("fox", "ox"))
    assert captured(data=replace(run.data, path=str(tmp_path / "text.jsonl"))) == 26
    assert identities[0] == identities[1] != identities[-1]  # which a resumed fit would refuse


def test_a_full_disk_leaves_the_previous_head(tmp_path: Path) -> None:
    previous, head = CalibrationHead(4, 4), CalibrationHead(40, 40)
    torch.nn.init.ones_(previous.target)
    save_calibration(tmp_path, previous, "a" * 64, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(UserError, match=r"calibration\.safetensors: cannot be written"):
            save_calibration(tmp_path, head, "a" * 64, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(load_calibration(tmp_path, "a" * 64).target, previous.target)
    assert {path.name for path in tmp_path.iterdir()} == {WEIGHTS_FILE, META_FILE}


@pytest.mark.slow
@pytest.mark.thorough
def test_sigkill_then_resume_ends_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    fit = replace(FIT, epochs=None, steps=30, save_every=10)
    calibrate(calibrating(folder, tmp_path / "straight", fit=fit))
    straight = load_file(folder / "drafter" / WEIGHTS_FILE)
    run = calibrating(folder, tmp_path / "killed", fit=fit)
    job = launch("train/calibrate.py", run)
    kill_when(lambda: any((tmp_path / "killed").rglob("*.safetensors")), job)  # while it captures
    assert not list((tmp_path / "killed").glob("checkpoint-*"))
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "killed" / "captured").rglob("*.safetensors")}
    (folder / "drafter" / WEIGHTS_FILE).unlink()
    with pytest.raises(KeyboardInterrupt):  # now while it fits
        interrupted_at(20, lambda: calibrate(replace(run, resume=True)))
    calibrate(replace(run, resume=True))
    assert kept
    assert kept == {p: p.stat().st_mtime_ns for p in kept}  # what was captured was not captured again
    resumed = load_file(folder / "drafter" / WEIGHTS_FILE)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)

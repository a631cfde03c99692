"""Calibration: what is captured, the checkpoint of a head, the command."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from outrider import preset
from outrider.base.errors import UserError
from outrider.base.processes import join_processes
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import Split
from outrider.draft_models.calibration import META_FILE, WEIGHTS_FILE, load_calibration
from outrider.draft_models.early_exit.checkpoint import read_meta
from outrider.draft_models.targets.settings import HEAD_FOLDER, TARGET, ReadingChanges
from outrider.draft_models.targets.tensor_files import TensorFiles
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.drafter import Drafter, DraftModel
from outrider.inference.core.rounds import Round
from outrider.inference.drafters.dflash.drafter import OneBlock
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel
from outrider.inference.evaluate.evaluation import evaluate
from outrider.inference.measure.replay import RecordedSession, replay
from outrider.inference.measure.time_limit import TimeLimit, spread_order
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS
from outrider.inference.shapes.factory import Chain
from outrider.inference.stopping.interface import FixedLength
from outrider.train.calibrate import calibrate
from outrider.train.core.training import Batch
from outrider.train.parts.calibration_scores import brier_score, predict_acceptance, rounds_of_later_half
from outrider.train.parts.capture import (
    ROW_TOKENS,
    Drafting,
    TextToContinue,
    capture,
    capture_splits,
    join_batches,
    select_tested,
)
from tests import tiny
from tests.fitted_heads import fitted_block, fitted_head
from tests.refusals import refusal
from tests.train.jobs import CALIBRATING as FIT
from tests.train.jobs import calibrating, captured_by, interrupted_at, same, save_for_calibration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_for_calibration(tmp_path_factory.mktemp("calibrate"))


def drafting(kind: str, path: Path, prompt: list[int]) -> tuple[Callable[[], DraftModel], Callable[..., torch.Tensor]]:
    """A drafter for the target in `path`, sometimes right after `prompt`, and its output head."""
    if kind == "early_exit":
        drafter = tiny.make_drafter(path, tiny.LAYERS - 1, noise=0.1)
        return lambda: EarlyExitDraftModel(drafter), drafter.logits
    _, stack = tiny.open_stack(path)
    if kind == "eagle3":
        answer = [token for r in autoregressive(stack, prompt, max_new_tokens=30) for token in r.tokens]
        head = fitted_head(stack, [(prompt, answer)])
        return lambda: Eagle3DraftModel(head), head.logits
    if kind == "dspark":
        answer = [token for r in autoregressive(stack, prompt, max_new_tokens=30) for token in r.tokens]
        block = fitted_block(stack, [(prompt, answer)], rank=6)
        bias = block.markov_head.markov_w2  # type: ignore[union-attr]
        return lambda: OneBlock(block), lambda evidence: block.spread(
            block.draft_logits(evidence[:, :-6]) + bias(evidence[:, -6:])
        )
    generator = torch.Generator().manual_seed(5)
    for parameter in stack.layers[-1].parameters():
        if parameter.ndim == 2:
            parameter.data += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return lambda: SmallLMDraftModel(stack), stack.logits


@pytest.mark.parametrize("kind", ["early_exit", "small_lm", "eagle3", "dspark"])
def test_what_is_captured_is_what_happened(tmp_path: Path, kind: str) -> None:
    """Every tested token, in order, with its outcome; hidden states and confidence are those of plain decoding."""
    path, prompt = tiny.save_target(tmp_path / "target"), tiny.random_prompt(12)
    _, stack = tiny.open_stack(path)
    draft_model, logits_of = drafting(kind, path, prompt)
    got = capture(Drafting(partial(speculative, stack), draft_model, 30, 4), TextToContinue(prompt))

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
    path = tiny.save_target(tmp_path / "target")
    _, stack = tiny.open_stack(path)
    prompt = tiny.random_prompt(12)
    draft_model, _ = drafting("early_exit", path, prompt)
    given = Drafting(partial(speculative, stack), draft_model, 30, 4), TextToContinue(prompt)
    part, whole = (capture(*given, all_of_it) for all_of_it in (False, True))
    assert len(whole["label"]) > len(part["label"])
    kept = select_tested(whole)
    assert all(torch.equal(kept[name], part[name]) for name in part)
    assert all((whole["position"].diff() == 1) | (whole["position"][1:] == 1))


def test_a_recorded_answer_that_was_cut_is_captured_as_far_as_it_goes(tmp_path: Path) -> None:
    path, prompt = tiny.save_target(tmp_path / "target"), tiny.random_prompt(12)
    draft_model, _ = drafting("small_lm", path, prompt)
    answer = [token for r in autoregressive(tiny.open_stack(path)[1], prompt, max_new_tokens=11) for token in r.tokens]
    live = capture(Drafting(partial(speculative, tiny.open_stack(path)[1]), draft_model, 11, 4), TextToContinue(prompt))
    recorded = partial(replay, session=partial(RecordedSession, vocabulary=tiny.VOCABULARY))
    again = capture(Drafting(recorded, draft_model, 30, 4), TextToContinue(prompt, answer))
    assert all(torch.equal(again[name], live[name]) for name in ("position", "confidence", "label"))


def test_a_text_ends_where_it_does_though_drafts_are_indices(tmp_path: Path) -> None:
    """All drafts are accepted; end ids are the indices of their tokens, and the id of one token within a draft."""
    path, prompt = tiny.save_target(tmp_path / "target"), tiny.random_prompt(12)
    _, stack = tiny.open_stack(path)
    answer = [token for r in autoregressive(stack, prompt, max_new_tokens=30) for token in r.tokens]
    end = next(at for at in range(6, 25) if at % 5 in (1, 2, 3) and answer[at] not in answer[:at])
    drafter = tiny.make_drafter(path, tiny.LAYERS - 1, tokens=torch.tensor(sorted({*answer})))
    ends = {answer[end], *range(len({*answer}))} - {*answer[:end]}
    drafts = Drafting(partial(speculative, stack), lambda: EarlyExitDraftModel(drafter), 30, 4, ends)
    positions = capture(drafts, TextToContinue(prompt))["position"].tolist()
    assert positions == [at % 5 for at in range(1, end + 1) if at % 5]


class Texts:
    """Twenty texts to learn from and six of held-out ones, which take `seconds` each, twice that from 30 s on."""

    def __init__(self, path: Path, seconds: float = 1.0) -> None:
        self.stack, self.seconds, self.now, self.continued = tiny.open_stack(path)[1], seconds, 0.0, list[int]()
        self.draft_model, _ = drafting("early_exit", path, tiny.random_prompt(12))
        prompts = [TextToContinue(tiny.random_prompt(12, seed)) for seed in range(26)]
        self.every: dict[Split, list[TextToContinue]] = {"train": prompts[:20], "heldout": prompts[20:]}

    def decode(self, drafter: Drafter, prompt: list[int], **options: Any) -> Iterator[Round]:
        self.now += self.seconds * (1 if self.now < 30 else 2)
        self.continued.append([text.prompt for texts in self.every.values() for text in texts].index(prompt))
        return speculative(self.stack, drafter, prompt, **options)

    def capture(self, out_dir: Path, minutes: float | None = None, **settings: object) -> dict[Split, Batch]:
        limit, state = TimeLimit(minutes, clock=lambda: self.now), join_processes()
        return capture_splits(
            out_dir, settings, self.every, lambda: Drafting(self.decode, self.draft_model, 40, 4), limit, state
        )


@pytest.mark.parametrize("seconds", [1, 25])
def test_texts_are_continued_until_the_time_is_over(folder: Path, tmp_path: Path, seconds: float) -> None:
    """Held-out texts have what the others left; of either kind there is a row for `fit`, spread over all texts."""
    texts = Texts(folder / "target", seconds)
    found = texts.capture(tmp_path, minutes=1)
    learned, heldout = ([at for at in texts.continued if (at < 20) == train] for train in (True, False))
    assert texts.now <= 60 + 4 * seconds
    assert (len(learned), len(heldout)) == (20, 6) if seconds == 1 else (texts.now >= 60 or len(heldout) == 6)
    assert learned == spread_order(20)[: len(learned)]
    assert all(len(batch["label"]) >= ROW_TOKENS for batch in found.values())
    assert len(select_tested(found["heldout"])["label"]) < len(found["heldout"]["label"])  # whole rounds of these alone
    assert same(select_tested(found["train"]), found["train"])
    in_order = [
        capture(Drafting(texts.decode, texts.draft_model, 40, 4), texts.every["train"][at]) for at in sorted(learned)
    ]
    assert same(found["train"], join_batches(in_order))


def test_what_is_captured_is_kept_for_its_settings(folder: Path, tmp_path: Path) -> None:
    """A run that has begun to learn from it is not given other examples."""
    texts = Texts(folder / "target")
    first = texts.capture(tmp_path, max_draft=4)
    assert len(texts.continued) == 26
    again = texts.capture(tmp_path, max_draft=4)
    assert len(texts.continued) == 26
    assert all(same(first[split], again[split]) for split in first)
    texts.capture(tmp_path, max_draft=5)
    assert len(texts.continued) == 52
    (tmp_path / "checkpoint-3").mkdir()
    texts.capture(tmp_path, max_draft=5)
    refusal(r"learned from other examples .*another out_dir", texts.capture, tmp_path, max_draft=6)
    assert len(texts.continued) == 52


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
    captured = captured_by(tmp_path / "run")
    tokens = {split: len(captured[f"{split}.label"]) for split in ("train", "heldout")}
    assert tokens["heldout"] >= facts["heldout"]["tokens"] != tokens["train"] == facts["examples"]
    assert facts["heldout"]["survival"]["rounds"] > 0
    assert facts["format"] == 2
    # What is said is of the head that is stored, on the rounds that its temperatures were not fitted on.
    of_heldout = {name.partition(".")[2]: captured[name] for name in captured if name.startswith("heldout")}
    heldout = select_tested(rounds_of_later_half(of_heldout))
    said = facts["heldout"]["predictors"]["head"]["brier"]
    assert said == pytest.approx(brier_score(predict_acceptance(head, heldout), heldout["label"]), rel=1e-4)
    assert facts["heldout"]["tokens"] == len(heldout["label"])

    refusal("belongs to an earlier training", load_calibration, folder / "drafter", "0" * 64)
    refusal("no calibration head there", load_calibration, folder, sha)


def test_the_papers_head_learns_of_the_same_drafts_and_says_that_it_is(folder: Path, tmp_path: Path) -> None:
    """odds decides nothing of what is captured; the checkpoint says which head it is, and what it decodes with."""
    stored, heads, drafts = shutil.copytree(folder / "drafter", tmp_path / "drafter"), {}, set()
    for odds in (True, False):
        run = tmp_path / f"run_{odds}"
        calibrate(replace(calibrating(folder, run), checkpoint=str(stored), odds=odds))
        assert json.loads((stored / META_FILE).read_text())["odds"] is odds
        heads[odds] = load_calibration(stored, read_meta(stored).weights_sha256)
        drafts.add(next((run / "captured").glob("*")).read_bytes())
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
            refusal(f"{why}.*; run outrider calibrate checkpoint", evaluate, config)

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
    assert plugin.read_with(ReadingChanges()).digest(where) == plugin.digest(where)
    assert plugin.read_with(otherwise).digest(where) != plugin.digest(where)


def test_another_template_than_the_drafters_is_warned_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(folder / "target", tmp_path / "target"))
    tiny.byte_tokenizer("{{ messages }}").save_pretrained(path)
    talk = DataConfig(source="local", path="chat.jsonl", template="vicuna")
    record = {"data": json.loads(json.dumps(talk.decisions()))}
    tiny.save_exit(tmp_path / "drafter", path, tiny.LAYERS - 1, record)
    for data, warned in (
        (replace(talk, template="tokenizer"), True),
        (talk, False),
        (replace(talk, layout="text"), False),
    ):
        with pytest.raises(UserError, match="new_tokens=256: expected less"):
            calibrate(calibrating(tmp_path, tmp_path / "run", data=data, new_tokens=256))
        said = f"warning: data.template=tokenizer: the drafter in {tmp_path}/drafter learned by vicuna"
        assert (said in capsys.readouterr().err) == warned


def test_captured_is_what_these_settings_ask_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out text apart from the other, as much of it as leaves room; other settings or drafters are other keys."""
    asked: list[tuple[dict[str, object], list[list[int]]]] = []

    def capture(_: Path, settings: dict[str, object], texts: dict[Split, list[TextToContinue]], *__: object) -> None:
        asked.append((settings, [text.prompt for split in ("train", "heldout") for text in texts[split]]))
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.train.parts.capture.capture_splits", capture)
    run = calibrating(folder, tmp_path / "run", resume=True)
    path = folder / "target"
    tiny.save_exit(tmp_path / "other", path, tiny.LAYERS - 1, noise=0.2)
    others: list[dict[str, Any]] = [
        {"max_draft": 3}, {"new_tokens": 12}, {"dtype": "float64"}, {"checkpoint": str(tmp_path / "other")},
        {"minutes": 2.0}, {"new_tokens": 250}, {"l2": 3.0, "odds": False},
    ]  # fmt: skip
    for changes in ({}, *others):
        with pytest.raises(KeyboardInterrupt):
            calibrate(replace(run, **changes))
    (settings, prompts), *changed = asked
    assert len(prompts) == 20 + 6
    assert not any(prompt in prompts[20:] for prompt in prompts[:20])
    assert [other == settings for other, _ in changed] == [False] * 6 + [True]
    assert max(map(len, changed[5][1])) == 256 - 250


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_what_it_captured_and_ends_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    fit = replace(FIT, epochs=None, steps=30, save_every=10)
    calibrate(calibrating(folder, tmp_path / "straight", fit=fit))
    straight = load_file(folder / "drafter" / WEIGHTS_FILE)
    run = calibrating(folder, tmp_path / "stopped", fit=fit)
    (folder / "drafter" / WEIGHTS_FILE).unlink()
    interrupted_at(20, lambda: calibrate(run))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped" / "captured").iterdir()}
    calibrate(replace(run, resume=True))
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped" / "captured").iterdir()}
    assert same(load_file(folder / "drafter" / WEIGHTS_FILE), straight)

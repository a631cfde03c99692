"""A drafter for a target whose weights are elsewhere: trained, judged and calibrated by its recorded answers."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.base.errors import UserError
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.calibration import WEIGHTS_FILE
from outrider.draft_models.draft_vocabulary import narrow, read_draft_vocabulary
from outrider.draft_models.small_lm.model import TRAINING_FILE, load_small_lm
from outrider.draft_models.targets.narrowed import DraftVocabulary
from outrider.draft_models.targets.open_target import load_tokenizer, open_target, read_config
from outrider.draft_models.targets.settings import HEAD_FOLDER
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.drafters.small_lm.drafter import draft_model_of
from outrider.inference.measure.replay import RecordedSelector, RecordedSession, replay
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import preset
from outrider.train.calibrate import calibrate
from outrider.train.finetune_drafter import finetune_drafter, plan_memory
from outrider.train.parts import recorded_answers
from outrider.train.parts.capture import TextToContinue
from outrider.train.parts.drafter import export_model
from outrider.train.parts.heldout import Decoding
from outrider.train.parts.recorded_answers import recorded_texts
from outrider.train.settings.drafters import CalibrateConfig, DrafterConfig, FinetuneConfig
from tests.faults import plant
from tests.inference.evaluate.evaluating import evaluate
from tests.refusals import refusal
from tests.tiny import LAYERS, VOCABULARY, byte_tokenizer, open_stack, random_prompt, save_exit, save_target
from tests.train.jobs import CHAT, calibrating, finetuning

END = 105  # a token that the target says now and then


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with greedy and sampled answers of its own; its tokenizer alone, and with its config."""
    folder = tmp_path_factory.mktemp("unseen")
    target = save_target(folder / "target", kv_heads=2)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    lines = [json.dumps({"text": f"{i} the quick brown fox {i * 7919} jumps " * 3}) for i in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    data = DataConfig(source="local", path=str(folder / "text.jsonl"), layout="text", heldout_fraction=0)
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        options: dict[str, Any] = {"prefix_tokens": 16, "max_new_tokens": 24, "top_k_logits": 4}
        generate_responses(
            GenerateConfig(
                target=str(target), data=data, out_dir=str(folder / name), temperature=temperature, **options
            )
        )
    weights = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
    shutil.copytree(target, folder / "tokenizer", ignore=weights)
    shutil.copytree(target, folder / "described", ignore=shutil.ignore_patterns("*.safetensors"))
    small = Path(shutil.copytree(target, folder / "small"))
    tensors, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(5)
    for tensor in tensors.values():
        tensor += 0.04 * tensor.std() * torch.randn(tensor.shape, generator=generator) if tensor.ndim == 2 else 0
    save_file(tensors, small / "model.safetensors", {"format": "pt"})
    return folder


def unseen(
    folder: Path, out_dir: Path, tokenizer: str = "tokenizer", answers: str = "greedy", **changes: Any
) -> FinetuneConfig:
    """Four steps of the small LM in `folder` on recorded answers."""
    data = DataConfig(source="local", path=str(folder / answers), heldout_fraction=0.3, cache_dir=str(folder / "cache"))
    run = finetuning(
        folder / "target", data, out_dir, decode_prompts=6, decode_tokens=20, objective="cross_entropy",
        drafter=DrafterConfig(path=str(folder / "small")),
    )  # fmt: skip
    return replace(run, **{"target": None, "tokenizer": str(folder / tokenizer), **changes})


def decoding_of(folder: Path, run: FinetuneConfig) -> dict[str, float]:
    """What decoding by the target comes to, with the drafter that `run` has saved."""
    tokenizer, (_, stack) = load_tokenizer(str(folder / "target")), open_stack(folder / "target")
    texts, _ = recorded_texts(run.data, tokenizer, run.decode_prompts)
    drafter = load_small_lm(run.out_dir, tokenizer, dtype=torch.float32)
    prompts = [TextToContinue(text.prompt) for text in texts]
    return Decoding(prompts, run.decode_tokens, {END})(stack, draft_model_of(drafter))


def record_of(run: FinetuneConfig) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((Path(run.out_dir) / TRAINING_FILE).read_text())
    return record


FAULTS = {
    "the token after the one to verify": ("_after", "self._position + depth", "self._position + depth + 1"),
    "rejected tokens count": ("verify", "len(accepted_nodes) + 1", "len(proposed) + 1"),
}


def test_the_replay_of_a_targets_answers_is_its_decoding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of an evaluation, of answers that end and answers that are cut; faults of the replay show."""
    _, stack = open_stack(folder / "target")
    drafter = draft_model_of(
        load_small_lm(str(folder / "small"), load_tokenizer(str(folder / "target")), dtype=torch.float32)
    )
    decoding = Decoding([TextToContinue(random_prompt(12, seed)) for seed in range(6)], 20, ())
    end = (decoding.answer(stack).texts[0].answer or [])[7]
    decoding = replace(decoding, eos={end})
    answered, session = decoding.answer(stack), partial(RecordedSession, vocabulary=VOCABULARY)
    assert {text.answer[-1] == end for text in answered.texts if text.answer} == {True, False}
    live = decoding(stack, drafter)
    assert 1 < live["tau"] < 5
    assert answered.measure(partial(replay, session=session), drafter) == live
    for fault in FAULTS.values():
        with monkeypatch.context() as patch:
            plant(patch, RecordedSelector, *fault)
            assert answered.measure(partial(replay, session=session), drafter) != live


def test_recorded_texts_are_the_targets_prompts_and_greedy_answers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts and of conversations; a prompt without its first token has other answers."""
    _, stack = open_stack(folder / "target")
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "why"}]
    (tmp_path / "talks.jsonl").write_text(
        "".join(json.dumps({"messages": [{**talk[0], "content": f"{i}?"}, *talk[1:]]}) + "\n" for i in range(12))
    )
    target = shutil.copytree(folder / "target", tmp_path / "chat")
    byte_tokenizer(CHAT).save_pretrained(target)
    asked = DataConfig(source="local", path=str(tmp_path / "talks.jsonl"), heldout_fraction=0)
    generate_responses(GenerateConfig(
        target=str(target), data=asked, out_dir=str(tmp_path / "talks"), temperature=0.0, max_new_tokens=24
    ))  # fmt: skip

    def are_right(path: Path, tokenizer: Path) -> bool:
        data = DataConfig(source="local", path=f"{path}/responses-*.jsonl", heldout_fraction=0.3)
        texts, written = recorded_texts(data, load_tokenizer(str(tokenizer)), 6)
        said = Decoding([TextToContinue(text.prompt) for text in texts], 20, {END}).answer(stack).texts
        assert written
        assert texts
        if tokenizer == target:  # by another template the prompts are not those that were answered
            assert not recorded_texts(replace(data, template="vicuna"), load_tokenizer(str(tokenizer)), 6)[1]
        return [text.answer for text in said] == [text.answer and text.answer[:20] for text in texts]

    cases = [(folder / "greedy", folder / "tokenizer"), (tmp_path / "talks", target)]
    assert all(are_right(*case) for case in cases)
    plant(monkeypatch, recorded_answers, "first_answer", "ids[:answer_start]", "ids[1:answer_start]")
    assert not any(are_right(*case) for case in cases)


@pytest.mark.parametrize("tokenizer", ["tokenizer", "described"])
@pytest.mark.parametrize("teacher", ["none", "cached"])
def test_a_drafter_is_trained_and_chosen_without_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, teacher: str
) -> None:
    """Its τ is that of decoding by the target, for which the drafter is made; the target's files are never opened."""
    changes = {"teacher": "cached", "objective": "forward_kl"} if teacher == "cached" else {}
    run = unseen(folder, tmp_path / "out", tokenizer, **changes)
    hidden = folder / "target" / "model.safetensors"
    away = hidden.rename(tmp_path / "weights")
    try:
        finetune_drafter(run)
    finally:
        away.rename(hidden)
    record, live = record_of(run), decoding_of(folder, run)
    assert {name: record["metrics"][name] for name in live} == live
    assert live["tau"] > 1
    assert ("tau_analytic" in record["metrics"]) == (teacher == "cached")
    assert record["settings"]["tau_of"] == "that of greedy decoding, by replay of the target's recorded answers"
    assert record["settings"]["target"].keys() == {"vocabulary", "weights_seen"}
    assert not record["settings"]["target"]["weights_seen"]
    assert "target's weights: not seen" in (tmp_path / "out" / "README.md").read_text()
    evaluate(EvaluateConfig(
        target=str(folder / "target"), checkpoint=run.out_dir, methods={"m": preset("small_lm/fixed")},
        max_new_tokens=12, prompt_text=["the quick"], device="cpu", compare_transformers=False,
        out_dir=str(tmp_path / "report"),
    ))  # fmt: skip
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0


def test_text_that_is_not_the_targets_greedy_answers_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampled answers, answers of which no record says that they are greedy, and text of others."""
    shutil.copytree(folder / "greedy", folder / "anonymous", ignore=shutil.ignore_patterns("*.json", "skipped*"))
    (folder / "foreign").mkdir()
    (folder / "foreign/text.jsonl").write_bytes((folder / "text.jsonl").read_bytes())
    (folder / "logged").mkdir()
    lines = "".join(path.read_text() for path in sorted((folder / "greedy").glob("responses-*.jsonl"))).splitlines()
    (folder / "logged/log.jsonl").write_text(
        "".join(json.dumps({**json.loads(line), "greedy": True}) + "\n" for line in lines)
    )
    logged = unseen(folder, tmp_path / "logged", answers="logged")
    finetune_drafter(logged)
    assert record_of(logged)["settings"]["tau_of"].startswith("that of greedy decoding, by replay")
    for answers in ("sampled", "anonymous", "foreign"):
        run = unseen(folder, tmp_path / answers, answers=answers)
        finetune_drafter(run)
        record = record_of(run)
        assert record["settings"]["tau_of"].startswith("teacher-forced")
        assert record["metrics"]["tau"] >= 1
        assert "eval_tau is teacher-forced, on text that may differ" in capsys.readouterr().out
    assert "τ: teacher-forced" in (tmp_path / "foreign/README.md").read_text()


def test_the_vocabulary_has_all_tokens_of_the_answers(folder: Path, tmp_path: Path) -> None:
    """Without a config it is the tokenizer's, or larger if the target has written further tokens."""
    new = DrafterConfig(layers=1, hidden=32, heads=2, intermediate=48)
    runs = [unseen(folder, tmp_path / answers, answers=answers, drafter=new) for answers in ("greedy", "padded")]
    shutil.copytree(folder / "greedy", folder / "padded")
    for file in (folder / "padded").glob("responses-*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            record["written"]["documents"][0]["ids"][-1] = 300
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    sizes = []
    for run in runs:
        finetune_drafter(run)
        sizes.append(read_config(run.out_dir, role="small_lm").vocab_size)
    assert sizes == [len(load_tokenizer(str(folder / "target"))), 301]
    small, _ = open_stack(folder / "small")
    narrow(small, DraftVocabulary(torch.arange(0, 256, 2), VOCABULARY))
    export_model(small, byte_tokenizer(), tmp_path / "narrow")
    start, out_dir = DrafterConfig(path=str(tmp_path / "narrow")), str(tmp_path / "on")
    finetune_drafter(replace(runs[1], drafter=start, fit=replace(runs[1].fit, steps=1), out_dir=out_dir))
    assert vars(read_draft_vocabulary(out_dir, None, read_config(out_dir, role="small_lm")))["vocabulary"] == 301


def test_the_memory_has_no_target(folder: Path, tmp_path: Path) -> None:
    run = unseen(folder, tmp_path, "described")
    shape = read_config(str(folder / "small"))
    plans = [plan_memory(each, open_target(str(folder / "target")).config, shape).parts
             for each in (run, replace(run, target=str(folder / "target"), tokenizer=None))]  # fmt: skip
    purposes = [[part.purpose for part in parts] for parts in plans]
    assert purposes[1] == ["target's weights", *purposes[0]]


def recorded(folder: Path, out_dir: Path, **changes: Any) -> CalibrateConfig:
    """A head for the small LM in `folder`, of its target's recorded answers."""
    data = DataConfig(source="local", path=str(folder / "greedy"), heldout_fraction=0.3)
    options: dict[str, Any] = {
        "checkpoint": str(folder / "small"),
        "answers": "recorded",
        "prompts": 8,
        "heldout_prompts": 4,
    }
    return calibrating(folder, out_dir, data=data, **{**options, **changes})


def test_a_head_is_calibrated_without_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bit by bit the head of a run that knows the target, and serves before the target."""
    stored = folder / "small" / HEAD_FOLDER / WEIGHTS_FILE
    heads = {}
    for name in ("target", "described", "tokenizer"):
        given = {"target": str(folder / name)} if name == "target" else {"tokenizer": str(folder / name)}
        calibrate(recorded(folder, tmp_path / name, **given))
        heads[name] = load_file(stored)
    assert all(torch.equal(heads["described"][key], value) for key, value in heads["target"].items())
    narrow, wide = (heads[name].pop("target") for name in ("tokenizer", "target"))
    assert not narrow.any()
    assert not wide.any()
    assert (narrow.shape[1], wide.shape[1]) == (1, 64)
    assert all(torch.equal(heads["tokenizer"][key], value) for key, value in heads["target"].items())
    config = EvaluateConfig(
        target=str(folder / "target"), small_lm=str(folder / "small"), methods={"m": preset("small_lm/calibrated")},
        max_new_tokens=12, prompt_text=["the quick"], device="cpu", compare_transformers=False,
        out_dir=str(tmp_path / "report"),
    )  # fmt: skip
    evaluate(config)
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0


def test_what_needs_the_weights_is_refused_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    given = {"target": None, "tokenizer": str(folder / "tokenizer")}
    save_exit(tmp_path / "exit", folder / "target", LAYERS - 1)
    refusal(
        "tokenizer=.*: expected target=, whose layers an early exit drafts with",
        calibrate, recorded(folder, tmp_path / "run", checkpoint=str(tmp_path / "exit"), **given),
    )  # fmt: skip
    with pytest.raises(UserError, match="answers='target': expected recorded with tokenizer="):
        recorded(folder, tmp_path / "run", answers="target", **given)
    for changes in ({"objective": "forward_kl"}, {"objective": "forward_kl", "on_policy": 0.5}):
        with pytest.raises(UserError, match="teacher='online': expected cached, or objective=cross_entropy, with tok"):
            unseen(folder, tmp_path / "run", **changes)
    few = unseen(folder, tmp_path / "run", "described", decode_tokens=250)
    refusal("decode_prompts=6: expected held-out answers after prompts that leave room", finetune_drafter, few)

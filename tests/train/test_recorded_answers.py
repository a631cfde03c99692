"""Calibration by the target's answers on record: the evidence is that of the whole target, of which a part is read."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.base.errors import UserError
from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.calibration import WEIGHTS_FILE
from outrider.draft_models.formats.stored_tensors import Stored
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.settings import HEAD_FOLDER
from outrider.draft_models.targets.target import Target
from outrider.draft_models.targets.tensor_files import TensorFiles
from outrider.inference.batch.directory import Response, Shard
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.batch.tasks import TopK
from outrider.inference.core.decode import speculative
from outrider.inference.engines.cpu.recorded import record_choices
from outrider.inference.loading.models import load_stack, prepare_models
from outrider.train.calibrate import calibrate
from outrider.train.core.training import Batch
from outrider.train.parts import capture as capturing
from outrider.train.parts.capture import Drafting, TextToContinue
from outrider.train.parts.top_k_rows import TopKRows, load_top_k_rows
from outrider.train.settings.drafters import CalibrateConfig
from tests.refusals import refusal
from tests.tiny import LAYERS, byte_tokenizer, open_stack, save_target
from tests.train.jobs import CHAT, TEXT, calibrating, captured_by, same, save_for_calibration, save_responses

END = 105  # a token that the target says now and then
WITH_TARGET = capturing.capture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with greedy answers of its own, and two drafters for it that are right now and then."""
    folder = save_for_calibration(tmp_path_factory.mktemp("recorded"))
    target = folder / "target"
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    answer(folder, "greedy", temperature=0)
    small = folder / "small"
    small.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (small / name).write_bytes((target / name).read_bytes())
    generator = torch.Generator().manual_seed(5)
    weights = load_file(target / "model.safetensors")
    for name, tensor in weights.items():
        if f"layers.{LAYERS - 1}." in name and tensor.ndim == 2:
            tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(weights, small / "model.safetensors", {"format": "pt"})
    return folder


def answer(folder: Path, out: str, **options: Any) -> None:
    """Leave the target's answers to the beginnings of the texts in `folder`."""
    data = DataConfig(source="local", path=str(folder / "text.jsonl"), layout="text", heldout_fraction=0)
    given = {"prefix_tokens": 16, "max_new_tokens": 24, "top_k_logits": 2, **options}
    generate_responses(GenerateConfig(target=str(folder / "target"), data=data, out_dir=str(folder / out), **given))


def by_record(folder: Path, out_dir: Path, answers: str = "greedy", **changes: Any) -> CalibrateConfig:
    """A head of answers in `folder`, for its early exit unless `changes` say otherwise."""
    data = DataConfig(source="local", path=str(folder / answers), heldout_fraction=0.3)
    run = calibrating(folder, out_dir, data=data, answers="recorded", prompts=8, heldout_prompts=4)
    return replace(run, **changes)


def decoded_by(stack: Target, ends: set[bool]) -> Callable[..., Batch]:
    """In the place of `capture`: the whole target decodes the prompts, and its last hidden states are left out.

    ends: whether answers end with an end token, filled in.
    """

    def capture(drafting: Drafting, text: TextToContinue, whole: bool) -> Batch:
        assert text.answer is not None
        ends.add(text.answer[-1] == END)
        found = WITH_TARGET(replace(drafting, decode=partial(speculative, stack)), TextToContinue(text.prompt), whole)
        assert found["target_hidden"].any()
        return {**found, "target_hidden": torch.zeros_like(found["target_hidden"])}

    return capture


@pytest.mark.parametrize("kind", ["early_exit", "small_lm"])
def test_the_head_is_that_of_the_whole_target(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Bit by bit, but that it sees no hidden state of the last layer; and a token that was not said changes it."""
    shared, drafter = (LAYERS - 1, folder / "drafter") if kind == "early_exit" else (0, folder / "small")
    target, stored = str(folder / "target"), drafter / ("" if shared else HEAD_FOLDER) / WEIGHTS_FILE
    run = by_record(folder, tmp_path / "recorded", checkpoint=str(drafter), target=target)
    read, real = set[str](), TensorFiles.open_for_transformers

    def reading(files: TensorFiles, names: Iterable[str], *given: Any) -> dict[str, Stored]:
        names = [*names]
        read.update(names if files.source == target else ())
        return real(files, names, *given)

    with record_choices():  # one choice of kernels
        with monkeypatch.context() as patch:
            patch.setattr(TensorFiles, "open_for_transformers", reading)
            calibrate(run)
        layers = {int(found[1]) for name in read if (found := re.search(r"layers\.(\d+)", name))}
        assert layers == set(range(shared))
        assert bool(read) == bool(shared)
        head = stored.read_bytes()
        stack = load_stack(open_target(target), None, torch.float32, torch.device("cpu"), by_layers=True)
        prepare_models(stack, {})
        ends = set[bool]()
        monkeypatch.setattr(capturing, "capture", decoded_by(stack, ends))
        calibrate(replace(run, out_dir=str(tmp_path / "live")))
        assert stored.read_bytes() == head
        assert ends == {True, False}
        ours, first = captured_by(tmp_path / "recorded"), list[TextToContinue]()
        assert same(ours, captured_by(tmp_path / "live"))
        assert 0 < ours["train.label"].mean() < 1

        def misread(drafting: Drafting, text: TextToContinue, whole: bool) -> Batch:
            assert text.answer is not None
            first.append(text)
            wrong = [*text.answer[:5], text.answer[5] ^ (text is first[0]), *text.answer[6:]]
            return WITH_TARGET(drafting, TextToContinue(text.prompt, wrong), whole)

        monkeypatch.setattr(capturing, "capture", misread)
        calibrate(replace(run, out_dir=str(tmp_path / "misread")))
        assert not same(captured_by(tmp_path / "misread"), ours)
        assert stored.read_bytes() != head


def test_an_answer_with_another_token_than_the_likeliest_is_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of an engine that says nothing of how it chose."""
    left_out = []
    for fault in (0, 1):
        for file in (folder / "greedy").glob("responses-*"):
            (tmp_path / str(fault)).mkdir(exist_ok=True)
            (tmp_path / str(fault) / file.name).write_bytes(file.read_bytes())
        shard = next((tmp_path / str(fault)).glob("*.safetensors"))
        acceptances = load_file(shard)
        (answers,) = shard.parent.glob("*.jsonl")
        records = [json.loads(line) for line in answers.read_text().splitlines()]
        for record in records[::3]:
            acceptances[f"{record['id']}.tokens"][-1] ^= fault
            written = record["written"]["documents"][-1]
            written["ids"][written["answers"][-1][1] - 1] ^= fault
        save_file(acceptances, shard)
        answers.write_text("".join(json.dumps(record) + "\n" for record in records))
        calibrate(by_record(tmp_path, tmp_path / f"run{fault}", str(fault), checkpoint=str(folder / "drafter")))
        left_out.append([int(count) for count in re.findall(r"not_greedy=(\d+)", capsys.readouterr().out)])
    assert sum(left_out[0]) == 0 < sum(left_out[1])


def test_wrong_answers_are_refused_before_a_model_is_loaded(
    folder: Path, tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(folder, "sampled")
    answer(folder, "without", temperature=0, top_k_logits=0)
    other = save_target(tmp_path / "other", seed=1)
    byte_tokenizer(CHAT).save_pretrained(tmp_path / "templated")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "templated" / name).write_bytes((folder / "target" / name).read_bytes())
    monkeypatch.setattr(TensorFiles, "read", None)
    small = {"checkpoint": str(folder / "small")}
    bad: dict[str, dict[str, Any]] = {
        "sampled, but for the first tokens; make others": {"answers": "sampled"},
        "no response with the target's top-k .*without_top_k=.*top_k_logits=K": {"answers": "without"},
        "no file matches": {"answers": "nowhere"},
        "of another target than": {**small, "target": str(other)},
        "of another template than tokenizer": {**small, "target": str(tmp_path / "templated")},
        "answers=recorded: .* draft head": {"checkpoint": str(tiny_models / "eagle3"), "target": str(other)},
    }
    for message, changes in bad.items():
        refusal(message, calibrate, by_record(folder, tmp_path / "run", **changes))
    for data in (DataConfig(), DataConfig(source="hub", path="a/b")):
        with pytest.raises(UserError, match="answers='recorded': expected target without data=responses"):
            by_record(folder, tmp_path / "run", data=data)


@pytest.mark.parametrize("chat", [False, True])
@torch.no_grad()
def test_cached_rows_say_what_the_target_says(tmp_path: Path, target: Path, chat: bool) -> None:
    """At every label of every row: the distribution is the target's after exactly the tokens before it in its
    document."""
    data = save_responses(target, tmp_path / "responses", chat)
    rows = load_top_k_rows(data, byte_tokenizer(CHAT), 120)
    plain = load_rows(data, byte_tokenizer(CHAT), 120, "train")
    model, _ = open_stack(target)
    labels = 0
    for row in (rows[i] for i in range(len(rows))):
        assert all(len(value) == 120 for value in row.values())
        for document in set(row["documents"].tolist()) - {-1}:
            part = row["documents"] == document
            ids, wanted = row["input_ids"][part], row["labels"][part]
            assert row["positions"][part].tolist() == list(range(len(ids)))
            keep = wanted != IGNORE
            assert wanted[:-1][keep[:-1]].tolist() == ids[1:][keep[:-1]].tolist()
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[keep]
            top = row["top_logprobs"][part][keep]
            torch.testing.assert_close(logprobs.gather(-1, row["top_ids"][part][keep]), top, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(1 - top.exp().sum(-1), row["tail"][part][keep], rtol=2e-2, atol=5e-3)
            labels += int(keep.sum())
        assert (row["labels"][row["documents"] < 0] == IGNORE).all()
    # all that is supervised, but the end token that each response was cut off from (and a text's prompt)
    records = plain.counts["records"]
    if chat:
        assert labels == plain.counts["supervised"] - records
    else:
        assert plain.counts["supervised"] - 9 * records < labels < plain.counts["supervised"] - 6 * records
    assert load_top_k_rows(data, byte_tokenizer(CHAT), 120).key == rows.key
    shorter = load_top_k_rows(data, byte_tokenizer(CHAT), 30)
    assert max(int((shorter[i]["documents"] >= 0).sum()) for i in range(len(shorter))) <= 30


def texts_of(rows: TopKRows) -> set[str]:
    """The documents in all rows."""
    parts = [(rows[i]["input_ids"], rows[i]["documents"]) for i in range(len(rows))]
    return {str(ids[own == n].tolist()) for ids, own in parts for n in set(own.tolist()) - {-1}}


def test_cached_rows_are_of_the_files_and_records_asked_for(tmp_path: Path, target: Path) -> None:
    data = replace(save_responses(target, tmp_path / "responses"), heldout_fraction=0.5)

    def texts(**changes: Any) -> set[str]:
        return texts_of(load_top_k_rows(replace(data, **changes), byte_tokenizer(CHAT), 120))

    every = texts()
    first = texts(path=str(tmp_path / "responses" / "responses-00000.jsonl"))
    second = texts(path=str(tmp_path / "responses" / "responses-00001.jsonl"))
    assert first
    assert second
    assert first | second == every
    assert not first & second
    assert texts(max_records=12) == first  # of which those to be held out count too
    assert texts(max_records=6) < first


def save_top_k(folder: Path, k: int, logprob: float = -1.0) -> DataConfig:
    """Three texts from elsewhere, each with a distribution of `k` at all its tokens, the first one included."""
    responses = []
    for i in range(3):
        record = {"id": f"r{i}", "text": f"{i}: {TEXT}", "prompt_tokens": 0}
        tokens = torch.tensor(encode([record], byte_tokenizer(), "tokenizer")[0].ids)
        logprobs = torch.full((len(tokens), k), logprob)
        responses.append(Response(record, TopK(tokens, logprobs.long(), logprobs, torch.zeros(len(tokens)))))
    folder.mkdir(exist_ok=True)
    Shard(responses).save(folder, k)
    return DataConfig(source="local", path=f"{folder}/responses-*.jsonl", heldout_fraction=0.0)


def test_a_distribution_is_at_the_token_before_its_own_and_in_its_document(tmp_path: Path) -> None:
    rows = load_top_k_rows(save_top_k(tmp_path / "one", 2), byte_tokenizer(), 300)
    for row in (rows[i] for i in range(len(rows))):
        for document in set(row["documents"].tolist()) - {-1}:
            part = row["documents"] == document
            assert row["labels"][part].tolist() == [*row["input_ids"][part].tolist()[1:], IGNORE]
    other = load_top_k_rows(save_top_k(tmp_path / "other", 2, logprob=-2.0), byte_tokenizer(), 300)
    assert other.key != rows.key  # of equal texts, another distribution
    with pytest.raises(UserError, match=r"top-k of several k \(\[2, 3\]\); give one run's"):
        load_top_k_rows(save_top_k(tmp_path / "one", 3), byte_tokenizer(), 300)


def test_heldout_distributions_are_not_trained_on(tmp_path: Path, target: Path) -> None:
    data = replace(save_responses(target, tmp_path / "responses"), heldout_fraction=0.5)
    train, heldout = (load_top_k_rows(data, byte_tokenizer(), 120, split) for split in ("train", "heldout"))
    assert texts_of(train)
    assert texts_of(heldout)
    assert not texts_of(train) & texts_of(heldout)
    few = load_top_k_rows(data, byte_tokenizer(), 120, "heldout", max_rows=2)
    assert len(heldout) > len(few) == 2
    assert torch.equal(heldout[len(heldout) // 2]["top_logprobs"], few[1]["top_logprobs"])

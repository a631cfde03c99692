"""What can be known before the first minute, in every command: tokens, sizes, templates, prompts, files."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import outrider
from outrider.base.errors import UserError
from outrider.commands import config_for
from outrider.data_prep.ngrams.building import build_table
from outrider.data_prep.settings import TrigramConfig
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.small_lm.model import TRAINING_FILE
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.audit.answers import read_answers
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.drafters.ngrams.drafter import open_table
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from outrider.train.auto_run import run_auto
from outrider.train.eagle3 import train_eagle3
from outrider.train.eesd import train_early_exit
from outrider.train.export import export_drafter
from outrider.train.finetune_drafter import finetune_drafter
from outrider.train.pipeline_run import plan_steps
from outrider.train.settings.auto import AutoConfig
from outrider.train.settings.drafters import DrafterConfig
from outrider.train.settings.export import ExportConfig
from outrider.train.settings.pipeline import PipelineConfig
from tests.inference.batch.responding import skipped
from tests.inference.evaluate.evaluating import QUESTIONS, evaluate
from tests.refusals import refusal
from tests.tiny import byte_tokenizer, save_target
from tests.train import jobs

ROWS = 258  # the tokenizer's <pad> is the id 258
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + jobs.CHAT
USERS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": jobs.TEXT}]} for i in range(20)
]
SYSTEM = {"messages": [{"role": "system", "content": "be kind"}, *USERS[0]["messages"]]}


def save(path: Path, template: str = jobs.CHAT, **changes: Any) -> Path:
    """A target with a chat template."""
    save_target(path, **changes)
    byte_tokenizer(template).save_pretrained(path)
    return path


def write(file: Path, records: list[dict[str, Any]], **options: Any) -> DataConfig:
    file.write_text("\n".join(map(json.dumps, records)))
    data = DataConfig(source="local", path=str(file), heldout_fraction=0.2, cache_dir=str(file.parent / "cache"))
    return replace(data, **options)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokenizer has a token for padding that the embedding has no row for."""
    return save(tmp_path_factory.mktemp("short") / "target", vocab_size=ROWS)


def responding(target: Path, data: DataConfig, out_dir: Path) -> GenerateConfig:
    return GenerateConfig(target=str(target), data=data, max_new_tokens=4, out_dir=str(out_dir))


TRAININGS: dict[str, Callable[[Path, DataConfig, Path], None]] = {
    "small_lm": lambda *given: finetune_drafter(jobs.finetuning(*given)),
    "small_lm of some": lambda *given: finetune_drafter(jobs.finetuning(*given, draft_vocabulary=40)),
    "early_exit": lambda *given: train_early_exit(jobs.distilling(*given, draft_vocabulary=40)),
    "eagle3": lambda *given: train_eagle3(jobs.heading(*given, draft_vocabulary=40)),
}


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_token_without_a_row_is_in_nobodys_way(kind: str, short: Path, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """A tokenizer that has one trains; a record that contains it is left out, with a count and its place."""
    data = jobs.write_corpus(tmp_path)
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write("\n" + "\n".join(json.dumps({"text": f"the mask <pad> {i}"}) for i in range(10)))
    TRAININGS[kind](short, data, tmp_path / "out")
    said = capsys.readouterr()
    assert "refused=" in said.out
    assert "text.jsonl:61" in said.err
    assert "'<pad>' (id 258)" in said.err
    assert "258 rows" in said.err


def test_a_text_with_such_a_token_is_refused_by_its_name(short: Path, tmp_path: Path) -> None:
    what = r"holds the token '<pad>' \(id 258\).* 258 rows"
    model = outrider.load(str(short), dtype="float32")
    assert model.generate("hello", max_new_tokens=2) is not None
    for prompt in ("a <pad>", [{"role": "user", "content": "a <pad>"}]):
        refusal(f"prompt {what}", model.generate, cast(Any, prompt))
    config = EvaluateConfig(
        target=str(short),
        methods={"lookup": MethodConfig("prompt_lookup")},
        max_new_tokens=4,
        out_dir=str(tmp_path / "out"),
    )
    asked = replace(QUESTIONS[0], turns=("the <pad> is where",))
    refusal(f"prompt {asked.id} {what}", evaluate, config, [*QUESTIONS[1:], asked])
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt": "<pad>", "text": "b"}))
    refusal(rf"answers.jsonl:1: .*{what}", read_answers, str(tmp_path / "answers.jsonl"), open_target(str(short)))
    none = write(tmp_path / "none.jsonl", [{"text": f"<pad> {i} {jobs.TEXT}"} for i in range(9)])
    for run in TRAININGS.values():
        refusal(rf"no usable train record .*none.jsonl:\d {what}", run, short, none, tmp_path / "trained")
    with pytest.raises(UserError, match=rf"skipped=9.*none.jsonl:1: prompt {what}"):
        generate_responses(responding(short, replace(none, heldout_fraction=0.0), tmp_path / "answers"))


def test_a_table_is_refused_for_its_ids_and_not_for_its_tokenizers(short: Path, tmp_path: Path) -> None:
    target = open_target(str(short))
    for name, text, suffixes in (("known", [1, 2, 3], True), ("level", [1, 258, 3], False), ("text", [258], True)):
        table = TrigramTable.from_documents([text], (2,), 259, target.vocabulary_digest, suffixes=suffixes)
        table.save(tmp_path / name)
    assert open_table(str(tmp_path / "known"), target.vocabulary_digest, ROWS).vocabulary > ROWS
    for name in ("level", "text"):
        with pytest.raises(UserError, match=f"table=.*{name}.* ids beyond the target's {ROWS}"):
            open_table(str(tmp_path / name), target.vocabulary_digest, ROWS)
    data = write(tmp_path / "pad.jsonl", [{"text": f"{i} ab<pad>ab"} for i in range(40)])
    build_table(TrigramConfig(tokenizer=str(short), data=data, suffixes=True, out_dir=str(tmp_path / "own"), workers=1))
    assert open_table(str(tmp_path / "own"), target.vocabulary_digest, ROWS).vocabulary > ROWS


@pytest.mark.parametrize("rows", [256, 257])
def test_what_every_text_has_is_refused_before_the_target_is_loaded(rows: int, tmp_path: Path) -> None:
    """The token that ends texts."""
    path = save(tmp_path / "target", vocab_size=rows)
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=rf"any text holds the token '</s>' \(id 257\).* {rows} rows"):
        _ = open_target(str(path), by_layers=False).tokenizer


@pytest.mark.parametrize(
    ("of_target", "of_drafter", "tied"), [(260, 384, False), (384, 260, True), (384, 260, False), (ROWS, 384, True)]
)
def test_a_trained_small_lm_has_its_targets_rows(of_target: int, of_drafter: int, tied: bool, tmp_path: Path) -> None:
    """transformers drafts with what is saved, as with a model that export writes of one of another size."""
    target, small = tmp_path / "target", tmp_path / "small"
    save(target, vocab_size=of_target)
    save(small, vocab_size=of_drafter, tied=tied, seed=1)
    config = jobs.finetuning(target, jobs.write_corpus(tmp_path), tmp_path / "out", drafter=DrafterConfig(str(small)))
    finetune_drafter(config)
    exported = tmp_path / "exported"
    given = ExportConfig(checkpoint=str(small), target=str(target), engine="transformers", out_dir=str(exported))
    export_drafter(given)
    whole, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    asked = tokenizer("the quick", return_tensors="pt")
    plain = whole.generate(**asked, max_new_tokens=8, do_sample=False)
    for folder in (tmp_path / "out", exported):
        made = AutoModelForCausalLM.from_pretrained(folder)
        embedding, head = made.get_input_embeddings().weight, made.get_output_embeddings().weight
        assert made.config.vocab_size == of_target == len(head) == len(embedding)
        assert made.config.tie_word_embeddings == tied == torch.equal(head, embedding)
        assert torch.equal(plain, whole.generate(**asked, max_new_tokens=8, do_sample=False, assistant_model=made))
        assert int(made(**asked).logits.argmax(-1).max()) < min(of_target, of_drafter)
    with pytest.raises(UserError, match="engines load as it is"):
        export_drafter(replace(given, checkpoint=config.out_dir, out_dir=str(tmp_path / "no")))


def test_a_small_lm_with_fewer_rows_than_the_text_has_ids_drafts(short: Path, tmp_path: Path) -> None:
    """The other way round: the target has a row for the token, and the small LM has none."""
    target = save(tmp_path / "target")
    plain = outrider.load(str(target), dtype="float32", method="prompt_lookup")
    drafted = outrider.load(str(target), small_lm=str(short), dtype="float32", method="vanilla")
    prompt = "the <pad> is <pad> quick"
    assert drafted.generate(prompt, max_new_tokens=16) == plain.generate(prompt, max_new_tokens=16)
    config = EvaluateConfig(
        target=str(target), small_lm=str(short), methods={"vanilla": MethodConfig("small_lm")}, max_new_tokens=4,
        compare_transformers=False, doctor=True, out_dir=str(tmp_path / "out"),
    )  # fmt: skip
    evaluate(config, [replace(QUESTIONS[0], turns=(prompt,)), *QUESTIONS[1:]])


def test_a_record_that_the_template_refuses_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save(tmp_path / "target", NO_SYSTEM)
    data = write(tmp_path / "chat.jsonl", [*USERS, SYSTEM])
    for config in (data, replace(data, cache_dir=str(tmp_path / "other"))):  # whichever split it is in
        for split in ("train", "heldout"):
            load_rows(config, open_target(str(target)).tokenizer, 128, cast(Any, split))
    said = capsys.readouterr()
    assert said.out.count("refused=1") == 2
    assert "chat.jsonl:21" in said.err
    assert "no system here" in said.err
    config = responding(target, replace(data, heldout_fraction=0.0), tmp_path / "answers")
    generate_responses(config)
    assert re.search("chat.jsonl:21: .*no system here", capsys.readouterr().err)
    (refused,) = [one for one in skipped(config) if one["reason"] == "template"]
    assert refused["source"].endswith("chat.jsonl:21")
    finetune_drafter(jobs.finetuning(target, data, tmp_path / "out", seq_len=128))


def test_numbers_of_an_experiment_are_cut_to_the_target(tmp_path: Path) -> None:
    """And yours are not: the steps refuse them."""
    target = save(tmp_path / "target", max_position_embeddings=100)
    sizes = {"draft_vocabulary": 8192, "seq_len": 512}
    steps = {name: {**sizes, "data": "responses"} for name in ("eesd", "eagle3")}
    pipeline = PipelineConfig(steps=steps, more={"eesd": {"draft_vocabulary": 9000}}, target=str(target))
    settings = {step.name: step.settings for step in plan_steps(pipeline, config_for)}
    assert (settings["eesd"].draft_vocabulary, settings["eagle3"].draft_vocabulary) == (9000, 260)
    assert settings["eesd"].seq_len == settings["eagle3"].seq_len == 100


def test_auto_looks_at_the_prompts_that_it_will_measure(tmp_path: Path) -> None:
    """Before anything is made: too few, one that is too long, and one with a token without a row."""
    target = save(tmp_path / "target", vocab_size=ROWS, max_position_embeddings=256)
    ask = AutoConfig(target=str(target), prompts=str(tmp_path / "p.jsonl"), out_dir=str(tmp_path / "out"))
    for wrong, said in (
        ([], "3 prompts with different first turns; expected at least 10"),
        (["x" * 200] * 40, "200 tokens|expected 1 to 128"),
        (["the <pad>"] * 40, r"'<pad>' \(id 258\)"),
    ):
        asked = [{"turns": [f"{text} {i}"]} for i, text in enumerate([*wrong, "a", "b", "c"])]
        write(tmp_path / "p.jsonl", asked)
        for config in (ask, replace(ask, plan=True)):
            refusal(said, run_auto, config, config_for)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_and_nothing_is_taken_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that writes tokenizers raises a bare exception."""
    target = save(tmp_path / "target")
    config = jobs.finetuning(target, jobs.write_corpus(tmp_path), tmp_path / "out")

    def full(*_: object, **__: object) -> None:
        raise Exception("No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
        refusal(r"out.*No space left.*free space", finetune_drafter, config)
    assert not [*(tmp_path / "out").glob("config.json"), *(tmp_path / "out").glob("model.safetensors")]
    finetune_drafter(replace(config, resume=True))
    assert (tmp_path / "out" / TRAINING_FILE).exists()

"""The doctor in evaluate-checkpoint: whom it examines, its findings on early exits and small LMs, refusals."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.data_prep.text.prompts import Prompt
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.small_lm.model import TRAINING_FILE
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.inference.doctor.examine import examine, find_examinees
from outrider.inference.doctor.scores import Findings
from outrider.inference.evaluate.evaluation import evaluate
from outrider.inference.loading.drafters import load_drafters
from outrider.inference.loading.models import Models, load_models
from outrider.inference.loading.target_setup import find_setup
from outrider.inference.measure.prepared import render
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig
from tests.inference.doctor.fitted import TAPS, TEXTS, Clinic, write
from tests.refusals import refusal
from tests.tiny import LAYERS, byte_tokenizer, save_exit, save_target

SAYS_ROLES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OPENS = "{% if add_generation_prompt %}assistant: {% endif %}"
CHAIN = {"m": MethodConfig("eagle3", stop=StopConfig(max_draft=2))}


@pytest.fixture(scope="module")
def practice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat target; an early exit and a small LM that equal the target."""
    folder = tmp_path_factory.mktemp("practice")
    path = save_target(folder / "target")
    byte_tokenizer(SAYS_ROLES + OPENS).save_pretrained(path)
    conversation = {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because."}]}
    (folder / "chat.jsonl").write_text("\n".join([json.dumps(conversation)] * 3))
    data = DataConfig(source="local", path=str(folder / "chat.jsonl"), template="vicuna", heldout_fraction=0.0)
    fingerprint = open_target(str(path)).fingerprint
    record = {"data": json.loads(json.dumps(data.decisions()))}
    save_exit(folder / "exit", path, LAYERS - 1, record)
    shutil.copytree(path, folder / "lm")
    other = replace(fingerprint, weights="others")
    report = {"target": "base", "settings": {"target": asdict(other), "data": None}}
    (folder / "lm" / TRAINING_FILE).write_text(json.dumps(report))
    return folder


def findings(practice: Path, prompts: list[Prompt], **options: Any) -> dict[str, Findings]:
    given: dict[str, Any] = {"max_new_tokens": 20, "device": "cpu", "threads": 1, **options}
    config = EvaluateConfig(
        target=str(practice / "target"), doctor=True, methods={"m": MethodConfig("prompt_lookup")}, **given
    )
    setup = find_setup(config)
    drafters = load_drafters(config, setup.target, dtype=setup.dtype, device=setup.device)
    models = load_models(config, setup, drafters)
    rendered = [render(setup, prompt, prompt.turns[:1]) for prompt in prompts]
    return examine(config, setup, models, rendered)


def chat(count: int) -> list[Prompt]:
    return [Prompt(str(n), "questions" if n % 2 else "riddles", (f"question {n}?",), True) for n in range(count)]


def test_early_exits_and_small_lms_are_examined(practice: Path) -> None:
    """Agreement with the target, the record of the training, and the length of texts."""
    found = findings(
        practice, chat(6), checkpoint=str(practice / "exit"), small_lm=str(practice / "lm"), doctor_lengths=(256,)
    )
    assert list(found) == ["early_exit", "small_lm"]
    for one in found.values():
        assert one.ways[0].agree == (1.0,)
        assert one.lengths == {"256": 1.0}
        assert one.better is None
    [fact] = found["small_lm"].facts
    assert "not this target (weights: drafter 'others'" in fact.said
    assert fact.suspect


def test_only_heads_of_others_are_examined_unasked(practice: Path, tmp_path: Path) -> None:
    config = EvaluateConfig(
        target=str(practice / "target"), checkpoint=str(practice / "exit"), small_lm=str(practice / "lm"),
        eagle3="nowhere", methods=CHAIN,
    )  # fmt: skip
    setup: Any = find_setup(replace(config, eagle3=None, methods={"m": MethodConfig("prompt_lookup")}))
    models = Models(None, None, {"early_exit": object(), "small_lm": object()}, None)  # type: ignore[arg-type]
    assert find_examinees(config, setup, models) == {}
    everything = replace(models, drafters={**models.drafters, "eagle3": object()})
    assert find_examinees(replace(config, doctor=False), setup, everything) == {}


def test_a_head_that_is_misread_ends_the_run_unless_it_is_read_rightly(
    clinic: Clinic, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def taps_as_outputs(config: dict[str, Any], _: object) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = [tap - 1 for tap in TAPS]

    where = write(tmp_path / "head", clinic.head, clinic.stack, taps_as_outputs)
    config = EvaluateConfig(
        target=str(clinic.folder / "target"), eagle3=where, methods=CHAIN, prompt_text=TEXTS, max_new_tokens=24,
        device="cpu", threads=1, compare_transformers=False, num_prompts=None, out_dir=str(tmp_path / "out"),
    )  # fmt: skip
    refusal(r"Give reading.taps=\[1,2,3\] to read it so", evaluate, config)
    assert "reading.taps=[1,2,3] is better" in capsys.readouterr().out
    assert not (tmp_path / "out/report.json").exists()
    evaluate(replace(config, reading=ReadingChanges(taps=TAPS), num_prompts=4))
    report = json.loads((tmp_path / "out/report.json").read_text())
    declared = report["doctor"]["eagle3"]["ways"][0]
    assert declared["agreement"] > 0.5
    assert report["doctor"]["eagle3"]["better"] is None
    assert report["tau"] > 2  # the runtime reads it so, too
    assert report["lossless"]["identical"] == 4
    assert "doctor: eagle3, " in (tmp_path / "out/report.md").read_text()

"""`outrider auto server=URL`: drafters by the answers of a server, without the target's weights."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from outrider.base.settings import construct
from outrider.commands import config_for
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.open_target import load_tokenizer, open_target
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.measure.replay_report import MethodReplay
from outrider.inference.measure.statistics import MedianInterval
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.train import auto_choice
from outrider.train.auto_run import run_auto
from outrider.train.auto_server import recommend_there
from outrider.train.settings.auto import AutoConfig
from tests.inference.batch.serving import Engine, serving
from tests.refusals import refusal
from tests.train.test_auto import own_prompts
from tests.train.test_pipeline import printed_by


def row(method: str, tau: float, *expected: float, source: str = "small_lm") -> MethodReplay:
    there = MedianInterval(expected[0], expected[1:], 12) if expected else None
    settings = MethodConfig(source, stop=StopConfig(max_draft=3), **({"max_ngram": 2} if source != "small_lm" else {}))
    return cast(MethodReplay, SimpleNamespace(method=method, tau=tau, expected=there, settings=settings))


def test_the_recommendation_follows_from_the_interval() -> None:
    slow = row("small_lm_fixed_k2", 3.0, 0.8, 0.7, 0.9)
    pays = row("small_lm_fixed_k3", 2.0, 1.4, 1.3, 1.5)
    lookup = row("prompt_lookup_k3", 1.9, 1.5, 1.2, 1.8, source="prompt_lookup")
    assert "`small_lm_fixed_k3` should be the fastest in this engine: 1.40" in recommend_there([slow, pays])
    assert recommend_there([slow, pays]).endswith("runs the exported drafter alone; drafts of 3 tokens")
    assert '"num_speculative_tokens": 3, "prompt_lookup_max": 2' in recommend_there([slow, pays, lookup])
    assert recommend_there([slow]).startswith("nothing pays here: the best, `small_lm_fixed_k2`")
    assert recommend_there([row("a_k1", 2.0, 1.1, 0.9, 1.3)]).startswith("undecided: the best, `a_k1`")
    few = SimpleNamespace(**{**vars(pays), "expected": MedianInterval(1.4, (1.3, 1.5), 4)})
    assert "undecided: a verdict needs 5 conversations" in recommend_there([cast(MethodReplay, few)])
    assert "could not be timed; `b_k2` has the most, τ 2.10" in recommend_there([row("a_k1", 2.0), row("b_k2", 2.1)])


def test_what_a_server_cannot_have_is_refused() -> None:
    config = AutoConfig(server="http://localhost:1", tokenizer="org/model", prompts="p.jsonl")
    refusal("tokenizer: missing", replace, config, tokenizer=None)
    refusal("prompts: missing", replace, config, prompts=None)
    refusal("the server runs the target", replace, config, target="org/model")
    refusal("draft with the target's hidden states", replace, config, train=("eagle3",))
    refusal("it is read with server=URL", replace, config, server=None)


@pytest.mark.slow
def test_drafters_for_a_target_whose_weights_are_elsewhere(
    tmp_path: Path, chat_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From prompts and a corpus to a table, a small LM, exports and a replay."""
    monkeypatch.chdir(tmp_path)
    target = open_target(chat_target)
    model = target.layers(dtype=torch.float32)
    engine = Engine(model, load_tokenizer(chat_target), end_tokens(target))
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    for file in Path(chat_target).iterdir():
        if file.suffix in (".json", ".jinja") and "safetensors" not in file.name:
            (elsewhere / file.name).write_bytes(file.read_bytes())
    texts = [f"What is {i}? It is {i} and no {i + 1}. " * 9 for i in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(auto_choice, "_WITH_TRAINING", (0.9, 0.05, 0.05))  # trainings take all their minutes
    monkeypatch.setattr(auto_choice, "FIRST_MINUTES", (0.05, 0.05, 0.1))
    with serving(engine) as url:
        config = AutoConfig(
            server=url, tokenizer=str(elsewhere), prompts=str(own_prompts(tmp_path)), train=("small_lm",), minutes=5.0,
            concurrency=4, corpus=("texts.jsonl",), out_dir="out",
        )  # fmt: skip
        said = printed_by(lambda: run_auto(config, config_for))
    content = json.loads(Path("out/replay/report.json").read_text())
    rows = construct(list[MethodReplay], content["reports"])
    assert {row.method.rpartition("_k")[0] for row in rows} == {"prompt_lookup", "ngrams", "small_lm_fixed"}
    assert all(row.turns == row.greedy_turns == 12 for row in rows)
    assert recommend_there(rows) in said
    assert "could not be timed" in said  # this server does not stream
    assert Path("out/export/small_lm/README.md").exists()
    of_corpus, of_all = (TrigramTable.open(f"out/{step}").facts["tokens"] for step in ("corpus_table", "trigrams"))
    assert of_all > of_corpus > 0
    assert not [*elsewhere.glob("*.safetensors")]

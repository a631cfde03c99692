"""The servers that the audit is tried on do what their names say, and its verdicts on parts are those on the whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference.audit.answers import ServedAnswer
from inference.audit.audit import judged, read
from outrider.streams import Streams
from tests.tiny import random_prompt, save_target

PROMPTS = [random_prompt(length, length) for length in (5, 9, 7)]
SEEDS, LENGTH = (3, 4, 5), 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = save_target(tmp_path_factory.mktemp("audited") / "target", kv_heads=2, peak=3.0, num_hidden_layers=2)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def sampled(model: PreTrainedModel, choose: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    from served_answers import rounded, sample

    return sample(model, rounded(model), prompts, choose, SEEDS[: len(prompts)], LENGTH)


def test_without_a_fault_the_samplers_say_what_generate_says(model: PreTrainedModel) -> None:
    from served_answers import best, drafted, drawn, sample

    said = [
        model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=LENGTH)[0, len(ids) :].tolist()
        for ids in PROMPTS
    ]
    assert sampled(model, best) == said
    assert sampled(model, drafted(lambda *_: torch.tensor(False), best, best)) == said
    assert sampled(model, drafted(lambda *_: torch.tensor(False), drawn, best)) == sampled(model, drawn)
    assert sampled(model, drawn) != said
    by_itself = sample(model, model, PROMPTS, drafted(lambda *_: torch.tensor(True), drawn, best), SEEDS, LENGTH)
    assert by_itself == said
    assert sampled(model, drawn, PROMPTS[:1]) == sampled(model, drawn)[:1]  # whoever is in the batch


def test_prompts_lose_what_the_server_does_not_read() -> None:
    from served_answers import bare, without_system_turn

    begin, end, line = 1, 2, 9
    ids = [begin, 40, line, 50, end, line, begin, 41, line, 60, 61, end, line, begin, 42, line]
    assert without_system_turn(ids) == ids[6:]
    assert bare(ids) == [60, 61]


def test_a_draft_is_accepted_where_its_rule_says_so() -> None:
    from served_answers import best, by_chance, drafted, drawn, in_top_3, nearly_best, one_in_200, typical

    p = torch.tensor([[0.5, 0.3, 0.15, 0.04, 0.01]]).log().repeat(5, 1)
    q = torch.eye(5).log().clamp(min=-100)
    coins = torch.tensor([[0.999, 0.0, 0.2]], dtype=torch.float64).repeat(5, 1)
    places = torch.tensor([0, 199, 200, 399, 1])

    def chosen(accepts: Any, otherwise: Any = best) -> list[int]:
        return drafted(accepts, otherwise, best)(p, q, coins, places).tolist()

    assert chosen(in_top_3) == [0, 1, 2, 0, 0]
    assert chosen(nearly_best) == [0, 1, 2, 0, 0]  # log 0.5 − log 0.15 = 1.2, but 2.5 for the next one
    assert chosen(one_in_200) == [0, 1, 0, 3, 0]
    assert chosen(by_chance, drawn) == [0, 1, 4, 4, 4]  # a coin of 0.2, and one of 0.999 after a rejection
    assert chosen(typical) == [0, 1, 2, 0, 0]  # min(0.09, 0.3 · exp(−1.2))


def test_verdicts_on_parts_are_those_on_the_whole(model: PreTrainedModel) -> None:
    from audit_servers import LEVEL, together
    from served_answers import best, drawn

    for temperature, choose in ((0.0, best), (1.0, drawn)):
        texts = zip(PROMPTS, sampled(model, choose), strict=True)
        answers = {
            line: ServedAnswer(prompt_ids=ids, output_ids=text, temperature=temperature)
            for line, (ids, text) in enumerate(texts, 1)
        }
        parts = [read(model, {line: answer}, Streams(0)) for line, answer in answers.items()]
        whole = judged(read(model, answers, Streams(0)), answers, LEVEL)
        assert judged(together(parts), answers, LEVEL) == whole
        assert whole.faults == ()


def test_the_function_of_vllm_is_mended_where_it_is_imported(tmp_path: Path) -> None:
    from served_answers import MENDED

    for folder, name, text in (
        ("site", "sitecustomize.py", MENDED),
        ("vllm", "__init__.py", ""),
        ("vllm/utils", "__init__.py", ""),
        ("vllm/utils", "cpu_triton_utils.py", "def _expand_kernel_impl(*given):\n    raise AssertionError\n"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    check = (
        "import torch; from vllm.utils.cpu_triton_utils import _expand_kernel_impl as expand\n"
        "out = torch.full((6,), 9.0)\n"
        "expand(out, torch.tensor([0.7, -1.0, 0.3]), torch.tensor([2, 3, 5], dtype=torch.int32), -1.0, 1, 4)\n"
        "assert out.tolist() == torch.tensor([0.7, 0.7, 1.0, 0.3, 0.3, 9.0]).tolist()"
    )
    path = {"PYTHONPATH": f"{tmp_path / 'site'}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", check], env=path, check=True)


def test_the_table_says_how_many_audits_accept_or_refuse() -> None:
    from audit_servers import table

    row = {"temperature": 1, "audits": [{}, {}], "together": {"numbers": {"tokens": 2200}, "faults": []}}
    rows = [
        {**row, "server": "good", "temperature": 0, "lossy": False, "refused": 0},
        {**row, "server": "good", "lossy": False, "refused": 1},
        {**row, "server": "bad", "lossy": True, "refused": 1, "together": {**row["together"], "faults": ["so"]}},
    ]
    assert table(rows)[2:] == [
        "| good | accepted 2 of 2, 1100 tokens each; all 2,200: accepted "
        "| accepted 1 of 2, 1100 tokens each; all 2,200: accepted |",
        "| bad | – | refused 1 of 2, 1100 tokens each; all 2,200: refused |",
    ]


def test_the_page_has_the_counts_of_the_record() -> None:
    from audit_servers import table

    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks/results/audit_servers.json").read_text())["rows"]
    assert "\n".join(table(rows)) in (root / "docs/audit.md").read_text()
    for row in rows:
        assert row["refused"] == sum(bool(one["faults"]) for one in row["audits"])
        assert row["lossy"] or row["refused"] == (row["server"] == "llama.cpp" and row["temperature"] == 0)

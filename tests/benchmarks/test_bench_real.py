"""The record: every arm on every prompt, kept prompt by prompt, one entry a dtype."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import VOCABULARY, open_stack, random_prompt, save_exit, save_target


def models(folder: Path) -> list[str]:
    """A target with two drafters in `folder`; the options that name them."""
    path = save_target(folder / "target", eos_token_id=257)
    save_target(folder / "small", seed=1)
    save_exit(folder / "eesd", path, 2, noise=0.1)
    return [f"target={path}", f"checkpoint={folder / 'eesd'}", f"small_lm={folder / 'small'}"]


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for one in sorted(folder.glob("results-*")) for line in one.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_record_has_every_arm_and_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_real
    from fill_tables import fill_record

    options = models(tmp_path)
    for name in ("one", "two"):
        lines = [json.dumps({"prompt": f"{name} {i}: "}) + "\n" for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        options += ["--prompts", f"{name}={tmp_path / name}.jsonl"]
    work = tmp_path / "work"

    def record(*more: str) -> dict[str, Any]:
        given = ["dtype=float32", "method=[eesd_fixed,vanilla,prompt_lookup]", "max_new_tokens=12", *options]
        monkeypatch.setattr(sys, "argv", ["bench_real.py", *given, "--work", str(work), *more])
        bench_real.main()
        found: dict[str, Any] = json.loads((work / "record.json").read_text())["entries"]["float32"]
        return found

    entry = record()
    before = kept(work / "float32")
    assert [line["turns"][0]["prompt_id"] for line in before] == ["one/1", "two/1", "one/2", "two/2"]
    assert record()["arms"].keys() == entry["arms"].keys()
    assert kept(work / "float32") == before
    with pytest.raises(SystemExit):
        record("--draft-tokens", "4")  # other peers
    assert set(entry["arms"]) == {
        "autoregressive", "transformers_generate", "eesd_fixed", "vanilla", "prompt_lookup",
        *(f"transformers_assisted_{who}{how}" for who in ("early_exit", "small_lm") for how in ("", "_default")),
        "transformers_prompt_lookup",
    }  # fmt: skip
    for name, arm in entry["arms"].items():
        assert arm["identical"] == entry["prompts"] == 4, name
        assert sum(part["tokens"] for part in arm["by_category"].values()) == arm["tokens"]
        low, high = arm["speedup"]["ci95"]
        assert low <= arm["speedup"]["median"] <= high
    assert entry["arms"]["eesd_fixed"]["tau"] > 1
    page = "a\n<!-- float32 table: begin -->\nold\n<!-- float32 table: end -->\nb\n"
    filled = fill_record(page, {"float32": entry})
    assert filled == fill_record(filled, {"float32": entry})
    assert "old" not in filled
    assert all(f"\n| {name} | 4/4 | " in filled for name in entry["arms"])


def test_a_judgement_says_whose_faults_it_found() -> None:
    from record_tables import judgement

    arms = {name: {"judged": {"prompts": 2, "peak": 1.5, "faults": faults}}
            for name, faults in (("vanilla", ["off"]), ("gsd", ["off"]), ("eesd", []))}  # fmt: skip
    assert "off (vanilla, gsd)" in judgement(arms)
    assert judgement({"vanilla": {"judged": None}}) == ""


@torch.no_grad()
def test_a_model_over_some_tokens_proposes_the_same_over_all(tmp_path: Path) -> None:
    """Its rows are those of a whole model; any other token is read as its last one, and never proposed."""
    from transformers_arms import widened

    whole, _ = open_stack(save_target(tmp_path / "whole"))
    narrow, _ = open_stack(save_target(tmp_path / "narrow"))
    tokens = torch.arange(3, VOCABULARY, 2)
    rows = torch.cat([tokens, torch.tensor([0])])
    for each in (narrow.model.embed_tokens, narrow.lm_head):
        each.weight = torch.nn.Parameter(each.weight[rows])
    model = widened(narrow, tokens, VOCABULARY)
    text = torch.tensor([random_prompt(12)])
    read = torch.where(torch.isin(text, tokens), text, 0)
    assert not torch.equal(read, text)
    mine, theirs = model(text).logits, whole(read).logits
    torch.testing.assert_close(mine[..., tokens], theirs[..., tokens])
    others = [token for token in range(VOCABULARY) if token not in tokens]
    assert bool((mine[..., others].amax(-1) < mine[..., tokens].amin(-1)).all())

"""The comparison of fused drafts: what its arms are, and a run over tiny models."""

import json
from pathlib import Path

import pytest

from draft_models.settings import SMALL_LM, TABLE, TARGET
from draft_models.tiny_models import save_tiny_models
from inference.method_settings import MethodConfig, NgramConfig, StructureConfig
from outrider.errors import UserError


def test_the_parts_are_those_of_the_fused_method() -> None:
    import compare_fused

    ngrams = NgramConfig(evidence="mixed", depth=9, recycle=4)
    fused = MethodConfig("eagle3", StructureConfig("fused", nodes="auto", max_depth="auto", width=3), ngrams=ngrams)
    given = ["--prompts", "a=b", "--ngram-nodes", "7"]
    arms = compare_fused.arms_of(fused, compare_fused.parse(given))
    assert list(arms) == ["fused", "drafter alone", "n-grams alone"]
    assert arms["fused"] == fused
    sized = compare_fused.arms_of(fused, compare_fused.parse([*given, "--nodes", "12", "--depth", "2", "--ablate"]))
    for made, nodes in ((arms, 7), (sized, 12)):
        tree, alone = made["drafter alone"], made["n-grams alone"]
        assert (tree.source, tree.structure.kind, tree.structure.width) == ("eagle3", "opt_tree", 3)
        assert alone == MethodConfig("ngrams", ngrams=NgramConfig(evidence="mixed", depth=9, recycle=4, nodes=nodes))
    for name in ("fused", "drafter alone", "maximum"):
        assert (sized[name].structure.nodes, sized[name].structure.max_depth) == (12, 2)
    assert len({repr(method) for method in sized.values()}) == len(sized) == 6


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    import compare_fused

    models = tmp_path / "models"
    save_tiny_models(models, "llama")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"line {i}: the "}) + "\n" for i in range(2)))
    told = [f"target={models / TARGET}", f"small_lm={models / SMALL_LM}", "max_new_tokens=10", "dtype=float32",
            "compare_transformers=false", "ignore_eos=true", "device=cpu", "--prompts", f"a={tmp_path}/a.jsonl",
            "--nodes", "8", "--depth", "2", "--work", str(tmp_path / "work")]  # fmt: skip
    with pytest.raises(UserError, match="table=None: expected an n-gram table"):
        compare_fused.contestants(compare_fused.parse(["method=[fused_small_lm]", *told]))
    told.insert(0, f"table={models / TABLE}")
    with pytest.raises(UserError, match=r"expected one of structure\.kind=fused"):
        compare_fused.contestants(compare_fused.parse(["method=[vanilla]", *told]))
    compare_fused.main(["method=[fused_small_lm]", *told])
    found = json.loads((tmp_path / "work/fused.json").read_text())
    assert set(found["gains"]) == {"all", "a"}
    assert found["gains"]["all"]["better_part"] in ("drafter alone", "n-grams alone")
    assert found["gains"]["a"]["over_better_part"]["prompts"] == found["prompts"] == 2
    for arm in ("fused", "drafter alone", "n-grams alone"):
        assert found["arms"][arm]["identical"] == 2
    assert (tmp_path / "work/fused.png").stat().st_size > 1000

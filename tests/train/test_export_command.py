"""A head goes into another dialect and back as it was; what a dialect cannot say is refused before anything is left."""

import importlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draft_models.draft_vocabulary import narrow, save_tokens
from draft_models.eagle3.card import use_of
from draft_models.eagle3.changes import ReadingChanges
from draft_models.eagle3.checkpoint import open_head
from draft_models.small_lm.model import load_small_lm
from draft_models.targets.architectures import load_config
from draft_models.targets.narrowed import DraftVocabulary
from draft_models.targets.open_target import open_target
from draft_models.targets.settings import EAGLE3, EARLY_EXIT, TABLE, TARGET
from inference.drafters.eagle3 import Eagle3Plugin
from inference.drafters.small_lm import PLUGIN
from outrider.errors import UserError
from tests.eagle3_heads import DIALECTS, VOCABULARY, head_weights, write_head
from tests.eagle3_heads import TARGET as WIDE_TARGET
from tests.inference.serving.vllm_stand_in import vllm_config
from tests.tiny import VOCABULARY as TINY
from tests.tiny import byte_tokenizer, random_prompt, save_target
from train.exporting import export_drafter
from train.settings.export import ExportConfig


def require_same_model(one: Path, other: Path) -> None:
    """What evaluate-checkpoint writes for an engine is what is exported."""
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert json.loads((one / "config.json").read_text()) == json.loads((other / "config.json").read_text())


def test_there_and_back(tiny_models: Path, tmp_path: Path) -> None:
    where, target = str(tiny_models / EAGLE3), str(tiny_models / TARGET)
    there = ExportConfig(checkpoint=where, target=target, dialect="speculators", out_dir=str(tmp_path / "there"))
    export_drafter(there)
    export_drafter(replace(there, checkpoint=there.out_dir, dialect="specforge", out_dir=str(tmp_path / "back")))
    config = load_config(target)
    first, middle, last = (open_head(str(place), config) for place in (where, tmp_path / "there", tmp_path / "back"))
    assert [each.dialect for each in (first, middle, last)] == ["specforge", "speculators", "specforge"]
    assert first.reading == middle.reading == last.reading
    assert first.made_here
    assert last.made_here
    before, after = first.tensors(), last.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    card = (tmp_path / "there/README.md").read_text()
    assert f"vllm serve {target}" in card
    assert there.out_dir in card
    half = replace(there, dtype="bfloat16")
    with pytest.raises(UserError, match="there: holds a model already; resume=true replaces it"):
        export_drafter(half)
    export_drafter(replace(half, resume=True))
    assert open_head(there.out_dir, config).tensors()["fc.weight"].dtype == torch.bfloat16
    with pytest.raises(UserError, match="expected another place than checkpoint="):
        export_drafter(replace(there, checkpoint=there.out_dir, resume=True))


def test_what_a_dialect_cannot_say_is_refused(tmp_path: Path) -> None:
    facts = DIALECTS["specforge"]  # with norms that EAGLE's first heads have not
    head = write_head(tmp_path / "head", facts, head_weights(facts))
    WIDE_TARGET.save_pretrained(tmp_path / "target")
    out_dir = str(tmp_path / "out")
    with pytest.raises(UserError, match="dialect=eagle: has no word for tap_norms=True"):
        export_drafter(ExportConfig(checkpoint=head, target=str(tmp_path / "target"), dialect="eagle", out_dir=out_dir))
    assert not list(Path(out_dir).glob("*.safetensors"))


def test_a_head_whose_config_is_wrong_is_written_as_it_should_be_read(tmp_path: Path) -> None:
    """Ids where offsets belong, and taps a layer off: with reading= the export is sound, and a doctor looks at it."""
    facts = DIALECTS["specforge"]
    weights = {**head_weights(facts), "d2t": torch.tensor(facts.draft_tokens)}
    head = write_head(tmp_path / "head", facts, weights)
    WIDE_TARGET.save_pretrained(tmp_path / "target")
    given = ExportConfig(checkpoint=head, target=str(tmp_path / "target"), out_dir=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"reading\.draft_ids=index reads it otherwise"):
        export_drafter(given)
    changes = ReadingChanges(draft_ids="index", taps=(2, 5, 8))
    export_drafter(replace(given, reading=changes))
    found = open_head(given.out_dir, WIDE_TARGET)
    measured: Any = SimpleNamespace(config=WIDE_TARGET, source=given.target)
    Eagle3Plugin(changes).serve(head, measured, torch.float32, tmp_path / "served")
    require_same_model(Path(given.out_dir), tmp_path / "served")
    assert (found.reading.taps, found.reading.draft_ids, found.made_here) == ((2, 5, 8), "offset", False)
    assert torch.equal(found.tensors()["d2t"], head_weights(facts)["d2t"])
    with pytest.raises(UserError, match=r"reading\.own_head=false: expected null"):
        export_drafter(replace(given, reading=ReadingChanges(draft_ids="index", own_head=False), resume=True))


def test_the_card_has_commands_of_servers_that_read_the_dialect() -> None:
    both, vllm, neither = use_of("specforge", False), use_of("speculators", False), use_of("eagle", True)
    assert [("vllm serve" in card, "sglang" in card) for card in (both, vllm, neither)] == [
        (True, True), (True, False), (False, True),
    ]  # fmt: skip
    assert "SGLang: not in this dialect" in vllm
    assert "vLLM: not in this dialect" in neither


def test_maps_of_the_vocabulary_are_written_where_readers_ask_for_them(tmp_path: Path) -> None:
    """speculators' model has none where all tokens are drafted; SpecForge's always has them."""
    facts = replace(DIALECTS["specforge"], draft_tokens=tuple(range(VOCABULARY)))
    head = write_head(tmp_path / "head", facts, head_weights(facts), draft_vocab_size=VOCABULARY)
    WIDE_TARGET.save_pretrained(tmp_path / "target")
    given = ExportConfig(checkpoint=head, target=str(tmp_path / "target"))
    for dialect, maps in (("speculators", set[str]()), ("specforge", {"d2t", "t2d"})):
        out_dir = tmp_path / dialect
        export_drafter(replace(given, dialect=dialect, out_dir=str(out_dir)))
        assert load_file(out_dir / "model.safetensors").keys() & {"d2t", "t2d"} == maps
        assert not open_head(str(out_dir), WIDE_TARGET).made_here  # a doctor has still to see it


def test_the_page_of_a_table_has_the_line_that_serves_it(
    tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class is found by its name, from the clone, and the table by its variable."""
    where, target = str(tiny_models / TABLE), str(tiny_models / TARGET)
    given = ExportConfig(checkpoint=where, target=target, out_dir=str(tmp_path / "out dir"))
    export_drafter(given)
    page = Path(given.out_dir, "README.md").read_text()
    assert f"evaluate-checkpoint target={target} table={where} method=ngrams" in page
    (line,) = [line for line in page.splitlines() if "vllm serve" in line]
    *variables, command, serve, model, option, said = shlex.split(line)
    assert (command, serve, model, option) == ("vllm", "serve", target, "--speculative-config")
    environment = dict(variable.split("=", 1) for variable in variables)
    assert environment == {"PYTHONPATH": str(Path(__file__).parents[2]), "OUTRIDER_TABLE": where}
    monkeypatch.setenv("OUTRIDER_TABLE", environment["OUTRIDER_TABLE"])
    settings = json.loads(said)
    assert settings.keys() == {"method", "model", "num_speculative_tokens"}
    module, _, name = settings["model"].rpartition(".")
    vocabulary = load_config(target).vocab_size
    config = vllm_config(settings["num_speculative_tokens"], 64, vocabulary)
    getattr(importlib.import_module(module), name)(config).load_model()
    with pytest.raises(UserError, match="holds a model already; resume=true replaces it"):
        export_drafter(given)
    export_drafter(replace(given, target=None, resume=True))
    assert "vllm serve MODEL " in Path(given.out_dir, "README.md").read_text()


@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        (EARLY_EXIT, {"dialect": "eagle"}, "dialect=eagle"),
        (EARLY_EXIT, {"reading": ReadingChanges(taps=(1, 2))}, r"reading\.taps=\[1,2\]"),
        (TABLE, {"dialect": "eagle"}, "dialect=eagle"),
        (TABLE, {"reading": ReadingChanges(rope="plain")}, r"reading\.rope=plain"),
        (TABLE, {"dtype": "float16"}, "dtype=float16"),
        (TABLE, {"revision": "v1"}, "revision=v1"),
    ],
)
def test_an_option_that_a_kind_does_not_read_is_refused(
    tiny_models: Path, tmp_path: Path, kind: str, given: dict[str, Any], named: str
) -> None:
    where = str(tiny_models / kind)
    holds = {EARLY_EXIT: "early_exit", TABLE: "ngrams"}[kind]
    with pytest.raises(UserError, match=f"{named}: .* holds {holds}, which does not read it; leave it out"):
        export_drafter(ExportConfig(checkpoint=where, out_dir=str(tmp_path / "out"), **given))
    assert [file.name for file in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_table_of_another_tokenizer_is_refused(tiny_models: Path, tmp_path: Path) -> None:
    WIDE_TARGET.save_pretrained(tmp_path / "target")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "target")
    given = ExportConfig(checkpoint=str(tiny_models / TABLE), target=str(tmp_path / "target"))
    with pytest.raises(UserError, match="the n-gram table was built with another tokenizer"):
        export_drafter(replace(given, out_dir=str(tmp_path / "out")))
    assert not (tmp_path / "out/README.md").exists()


def test_a_small_lm_over_some_tokens_is_written_over_all(tmp_path: Path) -> None:
    """What it drafts stays; one over all of them is refused, as engines load it already."""
    target = open_target(str(save_target(tmp_path / "target")))
    small, own = target.layers(dtype=torch.float32), DraftVocabulary(torch.arange(3, TINY, 2), TINY)
    narrow(small, own)
    small.save_pretrained(tmp_path / "small")
    save_tokens(tmp_path / "small", own)
    target.tokenizer.save_pretrained(tmp_path / "small")
    given = ExportConfig(checkpoint=str(tmp_path / "small"), out_dir=str(tmp_path / "out"))
    export_drafter(given)
    text = torch.tensor([random_prompt(30)])
    PLUGIN.serve(given.checkpoint, target, torch.float32, tmp_path / "served")
    require_same_model(Path(given.out_dir), tmp_path / "served")
    served = AutoModelForCausalLM.from_pretrained(given.out_dir)
    drafted = own.outward(small(own.inward(text)).logits)
    torch.testing.assert_close(served(text).logits[..., own.tokens], drafted[..., own.tokens])
    assert torch.equal(served(text).logits.argmax(-1), drafted.argmax(-1))
    assert load_small_lm(given.out_dir, target.tokenizer, dtype=torch.float32).predicted is None
    assert "vllm serve" in (Path(given.out_dir) / "README.md").read_text()
    with pytest.raises(UserError, match="load as it is"):
        export_drafter(replace(given, checkpoint=given.out_dir, out_dir=str(tmp_path / "again")))

"""A head goes into another dialect and back as it was; what a dialect cannot say is refused before anything is left."""

import importlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.base.errors import UserError
from outrider.base.settings import construct
from outrider.draft_models.dflash.checkpoint import open_drafter
from outrider.draft_models.draft_vocabulary import narrow, save_tokens
from outrider.draft_models.eagle3.checkpoint import describe_use, open_head
from outrider.draft_models.small_lm.model import TRAINING_FILE, load_small_lm
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.narrowed import DraftVocabulary
from outrider.draft_models.targets.open_target import load_config, open_target
from outrider.draft_models.targets.settings import DFLASH, EAGLE3, EARLY_EXIT, TABLE, TARGET, ReadingChanges
from outrider.inference.drafters.dflash.drafter import DFlashPlugin
from outrider.inference.drafters.eagle3.drafter import Eagle3Plugin
from outrider.inference.drafters.small_lm.drafter import SmallLMPlugin
from outrider.train import export
from outrider.train.export import export_drafter
from outrider.train.settings.drafters import Eagle3Config
from outrider.train.settings.export import ExportConfig
from tests.draft_models.test_early_exit import save_another
from tests.eagle3_heads import DIALECTS, VOCABULARY, head_weights, write_head
from tests.eagle3_heads import TARGET as WIDE_TARGET
from tests.gguf_files import dequantised, save_plain_target
from tests.inference.serving.vllm_stand_in import vllm_config
from tests.refusals import refusal
from tests.tiny import VOCABULARY as TINY
from tests.tiny import byte_tokenizer, random_prompt, save_target

TEXT = torch.tensor([random_prompt(30)])


def require_same_model(one: Path, other: Path) -> None:
    """What evaluate-checkpoint writes for an engine is what is exported."""
    weights = (load_file(folder / "model.safetensors") for folder in (one, other))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert json.loads((one / "config.json").read_text()) == json.loads((other / "config.json").read_text())


def test_there_and_back(tiny_models: Path, tmp_path: Path) -> None:
    where, target = str(tiny_models / EAGLE3), str(tiny_models / TARGET)
    there = ExportConfig(checkpoint=where, target=target, out_dir=str(tmp_path / "there"))
    export_drafter(there)
    export_drafter(replace(there, checkpoint=there.out_dir, engine="sglang", out_dir=str(tmp_path / "back")))
    config = load_config(target)
    first, middle, last = (open_head(str(place), config) for place in (where, tmp_path / "there", tmp_path / "back"))
    assert [each.dialect for each in (first, middle, last)] == ["specforge", "speculators", "specforge"]
    assert first.reading == middle.reading == last.reading
    assert first.made_here
    assert last.made_here
    torch.testing.assert_close(last.tensors(), first.tensors(), rtol=0, atol=0)
    card = (tmp_path / "there/README.md").read_text()
    assert f"vllm serve {target}" in card
    assert there.out_dir in card
    half = replace(there, dtype="bfloat16")
    refusal("there: holds a model already; resume=true replaces it", export_drafter, half)
    export_drafter(replace(half, resume=True))
    assert open_head(there.out_dir, config).tensors()["fc.weight"].dtype == torch.bfloat16
    with pytest.raises(UserError, match="expected another place than checkpoint="):
        export_drafter(replace(there, checkpoint=there.out_dir, resume=True))


def test_a_block_drafter_as_vllm_reads_it(tiny_models: Path, tmp_path: Path) -> None:
    """A drafter of any trainer; what is measured in the engine is what is exported."""
    target = str(tiny_models / TARGET)
    config = load_config(target)
    given = ExportConfig(checkpoint=str(tiny_models / DFLASH), target=target, out_dir=str(tmp_path / "out"))
    export_drafter(given)
    first, again = (open_drafter(where, config) for where in (given.checkpoint, given.out_dir))
    assert (again.reading, again.made_here) == (first.reading, True)
    torch.testing.assert_close(again.tensors(), first.tensors(), rtol=0, atol=0)
    card = (tmp_path / "out/README.md").read_text()
    assert '"method": "dspark"' in card
    assert '"num_speculative_tokens": 4' in card
    opened = open_target(target)
    assert DFlashPlugin().vllm_method(given.checkpoint, opened) == "dspark"
    DFlashPlugin().export(given.checkpoint, opened, torch.float32, tmp_path / "served")
    require_same_model(tmp_path / "out", tmp_path / "served")
    refusal("target=None: expected the model", export_drafter, replace(given, target=None, resume=True))
    refusal(
        "engine='sglang': expected an engine of .*: vllm, llama_cpp$",
        export_drafter,
        replace(given, engine="sglang", resume=True),
    )


def test_a_head_whose_config_is_wrong_is_written_as_it_should_be_read(tmp_path: Path) -> None:
    """Ids where offsets belong, and taps a layer off: with reading= the export is sound, and a doctor looks at it."""
    facts = DIALECTS["specforge"]
    weights = {**head_weights(facts), "d2t": torch.tensor(facts.draft_tokens)}
    head = write_head(tmp_path / "head", facts, weights)
    WIDE_TARGET.save_pretrained(tmp_path / "target")
    given = ExportConfig(checkpoint=head, target=str(tmp_path / "target"), out_dir=str(tmp_path / "out"))
    refusal(r"reading\.draft_ids=index reads it otherwise", export_drafter, given)
    changes = ReadingChanges(draft_ids="index", taps=(2, 5, 8))
    export_drafter(replace(given, reading=changes))
    found = open_head(given.out_dir, WIDE_TARGET)
    measured: Any = SimpleNamespace(config=WIDE_TARGET, source=given.target)
    Eagle3Plugin(changes).export(head, measured, torch.float32, tmp_path / "served")
    require_same_model(Path(given.out_dir), tmp_path / "served")
    assert (found.reading.taps, found.reading.draft_ids, found.made_here) == ((2, 5, 8), "offset", False)
    assert torch.equal(found.tensors()["d2t"], head_weights(facts)["d2t"])
    with pytest.raises(UserError, match=r"reading\.own_head=false: expected null"):
        export_drafter(replace(given, reading=ReadingChanges(draft_ids="index", own_head=False), resume=True))


def test_the_card_has_commands_of_servers_that_read_the_dialect() -> None:
    cards = [describe_use("specforge"), describe_use("speculators"), describe_use("gguf")]
    servers = ("vllm serve", "launch_server", "--spec-type draft-eagle3")
    assert [[server in card for server in servers] for card in cards] == [
        [True, True, False], [True, False, False], [False, False, True],
    ]  # fmt: skip
    assert "SGLang: not in this dialect" in cards[1]


def test_maps_of_the_vocabulary_are_written_where_readers_ask_for_them(tmp_path: Path) -> None:
    """speculators' model has none where all tokens are drafted; SpecForge's always has them."""
    facts = replace(DIALECTS["specforge"], draft_tokens=tuple(range(VOCABULARY)))
    head = write_head(tmp_path / "head", facts, head_weights(facts), draft_vocab_size=VOCABULARY)
    WIDE_TARGET.save_pretrained(tmp_path / "target")
    given = ExportConfig(checkpoint=head, target=str(tmp_path / "target"))
    engines: list[tuple[Any, set[str]]] = [("vllm", set()), ("sglang", {"d2t", "t2d"})]
    for engine, maps in engines:
        out_dir = tmp_path / engine
        export_drafter(replace(given, engine=engine, out_dir=str(out_dir)))
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
    clone = str(Path(__file__).parents[2])
    assert environment == {"PYTHONPATH": clone, "OUTRIDER_TABLE": where, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    monkeypatch.setenv("OUTRIDER_TABLE", environment["OUTRIDER_TABLE"])
    settings = json.loads(said)
    assert settings.keys() == {"method", "model", "num_speculative_tokens"}
    module, _, name = settings["model"].rpartition(".")
    vocabulary = load_config(target).vocab_size
    config = vllm_config(settings["num_speculative_tokens"], 64, vocabulary)
    getattr(importlib.import_module(module), name)(config).load_model()
    refusal("holds a model already; resume=true replaces it", export_drafter, given)
    export_drafter(replace(given, target=None, resume=True))
    assert "vllm serve MODEL " in Path(given.out_dir, "README.md").read_text()


@pytest.mark.parametrize(("kind", "given", "words"), [
    (EARLY_EXIT, {"reading": ReadingChanges(taps=(1, 2))}, r"taps=\(1, 2\): .* holds early_exit, which does not read"),
    (TABLE, {"reading": ReadingChanges(rope="plain")}, "reading.rope='plain': .* holds ngrams, which does not read it"),
    (TABLE, {"dtype": "float16"}, "dtype='float16': .* holds ngrams, which does not read it; leave it out"),
    (TABLE, {"revision": "v1"}, "revision='v1': .* holds ngrams, which does not read it; leave it out"),
    (TABLE, {"engine": "sglang"}, "engine='sglang': expected an engine of .*: vllm$"),
    (EAGLE3, {"engine": "openvino"}, "engine='openvino': expected an engine of .*: vllm, sglang, llama_cpp$"),
])  # fmt: skip
def test_what_is_not_for_a_kind_is_refused(
    tiny_models: Path, tmp_path: Path, kind: str, given: dict[str, Any], words: str
) -> None:
    config = ExportConfig(checkpoint=str(tiny_models / kind), out_dir=str(tmp_path / "out"), **given)
    refusal(words, export_drafter, config)
    assert [file.name for file in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_version_may_be_a_number_as_yaml_has_it() -> None:
    given = {"target": "x", "data": {}, "fit": {"steps": 1}}
    assert [construct(Eagle3Config, {**given, "version": number}).version for number in (3, 3.1)] == ["3", "3.1"]


def exit_of(path: Path, where: Path, architecture: str = "llama") -> ExportConfig:
    """The export of an exit for a new target whose tokenizer GGUF knows."""
    save_another(save_plain_target(path, architecture, vocab_size=330), where, 1)
    return ExportConfig(checkpoint=str(where), out_dir=str(where.with_name("out")))


def require_logits_of(config: ExportConfig, source: Path) -> None:
    """What was exported has the logits of the model in `source` as transformers loads it."""
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    exported = load_causal_lm(config.out_dir, dtype=torch.float32)
    torch.testing.assert_close(exported(TEXT).logits, reference(TEXT).logits, rtol=0, atol=0)


@pytest.mark.parametrize(("architecture", "dtype"), [
    ("llama", "float32"), ("qwen2", "float32"), ("llama", None), ("qwen2", None), ("llama", "q4_0"),
])  # fmt: skip
def test_llama_cpp_gets_the_model_that_others_get(architecture: str, dtype: Any, tmp_path: Path) -> None:
    """An early exit as a GGUF file, quantised by default; its lines serve it."""
    given = exit_of(tmp_path / "target", tmp_path / "exit", architecture)
    plain = replace(given, engine="transformers", out_dir=str(tmp_path / "plain"))
    ours = replace(given, engine="llama_cpp", dtype=dtype)
    export_drafter(plain)
    export_drafter(ours)
    source = Path(plain.out_dir)
    if dtype != "float32":
        with pytest.raises(AssertionError, match="not equal"):
            require_logits_of(ours, source)
        source = dequantised(source, tmp_path / "dequantised", (dtype or "q8_0").upper())
    require_logits_of(ours, source)
    assert {file.name for file in Path(ours.out_dir).iterdir()} == {".lock", "README.md", "model.gguf"}
    card = Path(ours.out_dir, "README.md").read_text()
    served = "model.gguf --spec-type draft-simple --spec-draft-n-max 3 --spec-draft-p-min 0.6"
    assert f" -md {ours.out_dir}/{served}" in card
    assert "vllm" not in card
    refusal("holds a model already; resume=true replaces it", export_drafter, ours)


def matrix_kinds(config: ExportConfig) -> set[str]:
    export_drafter(config)
    tensors = gguf.GGUFReader(f"{config.out_dir}/model.gguf").tensors
    return {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) == 2}


def test_for_llama_cpp_a_small_lm_that_drafts_is_quantised_and_a_target_is_not(tmp_path: Path) -> None:
    source, narrow_rows = (save_plain_target(tmp_path / str(size), hidden_size=size) for size in (256, 48))
    given = ExportConfig(checkpoint=str(source), engine="llama_cpp", out_dir=str(tmp_path / "out"), resume=True)
    assert matrix_kinds(given) == {"F32"}
    require_logits_of(given, source)
    drafter = replace(given, target=given.checkpoint)
    assert [matrix_kinds(drafter), matrix_kinds(replace(drafter, dtype="bfloat16"))] == [{"Q8_0"}, {"BF16"}]
    assert "F32" in matrix_kinds(replace(drafter, checkpoint=str(narrow_rows)))
    blocks = replace(drafter, checkpoint=str(narrow_rows), dtype="q5_0")
    refusal("dtype='q5_0': expected a dtype of floats: rows of 48", export_drafter, blocks)
    (source / TRAINING_FILE).write_text("{}")
    assert matrix_kinds(given) == {"Q8_0"}


def test_a_family_that_gguf_has_not_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = exit_of(tmp_path / "target", tmp_path / "exit")
    config = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    monkeypatch.setattr(export, "from_pretrained", None)
    refusal("GGUF: not supported here: hidden_act='gelu'", export_drafter, replace(given, engine="llama_cpp"))
    with pytest.raises(UserError, match=r"engine_python=.*nowhere': expected an environment with optimum-intel"):
        export_drafter(replace(given, engine="openvino", engine_python=str(tmp_path / "nowhere")))


def test_openvino_gets_what_its_own_tool_makes(tmp_path: Path) -> None:
    """By a stand-in, of the model that others get."""
    given = exit_of(tmp_path / "target", tmp_path / "exit")
    export_drafter(replace(given, engine="transformers", out_dir=str(tmp_path / "plain")))
    tool = tmp_path / "env/bin/optimum-cli"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\ncp "$4"/*.* "$9" && echo "$@" > "$9/said"\n')
    tool.chmod(0o755)
    ours = replace(given, engine="openvino", engine_python=str(tmp_path / "env"))
    export_drafter(ours)
    require_same_model(Path(ours.out_dir), tmp_path / "plain")
    said, card = Path(ours.out_dir, "said").read_text().split(), Path(ours.out_dir, "README.md").read_text()
    assert said[4:8] == ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    assert f"checkpoint={tmp_path}/target engine=openvino" in card
    assert f'draft_model=openvino_genai.draft_model("{ours.out_dir}", "CPU")' in card
    tool.write_text("#!/bin/sh\nexit 3\n")
    refusal("optimum-cli ended with status 3", export_drafter, replace(ours, out_dir=str(tmp_path / "failed")))
    assert [file.name for file in (tmp_path / "failed").iterdir()] == [".lock"]


def test_a_table_of_another_tokenizer_is_refused(tiny_models: Path, tmp_path: Path) -> None:
    save_target(tmp_path / "target")
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
    SmallLMPlugin().export(given.checkpoint, target, torch.float32, tmp_path / "served")
    require_same_model(Path(given.out_dir), tmp_path / "served")
    served = AutoModelForCausalLM.from_pretrained(given.out_dir)
    drafted = own.to_target_logits(small(own.to_draft_ids(text)).logits)
    torch.testing.assert_close(served(text).logits[..., own.tokens], drafted[..., own.tokens])
    assert torch.equal(served(text).logits.argmax(-1), drafted.argmax(-1))
    assert load_small_lm(given.out_dir, target.tokenizer, dtype=torch.float32).predicted is None
    assert "vllm serve" in (Path(given.out_dir) / "README.md").read_text()
    refusal("load as it is", export_drafter, replace(given, checkpoint=given.out_dir, out_dir=str(tmp_path / "again")))

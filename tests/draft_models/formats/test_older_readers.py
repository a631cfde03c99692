"""Models that are written here, read by transformers 4: the same model. It takes a config of version 5 for another."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.data_prep.settings import ConvertConfig
from outrider.data_prep.targets import convert_target
from outrider.draft_models.formats.save_model import for_older_readers, save_parts
from outrider.draft_models.targets.fingerprint import NOT_DECIDING, deciding_config
from outrider.draft_models.targets.open_target import load_tokenizer
from tests.families import FAMILIES, family_config, save_family
from tests.tiny import byte_tokenizer

ROOT = Path(__file__).parents[3]
OLDER = ROOT / ".engines/transformers4/bin/python"
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 500000.0}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**YARN, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {**PLAIN, "rope_type": "linear", "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 7000.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", PLAIN), "linear": ("llama", LINEAR), "yarn": ("qwen3", YARN), "llama3": ("llama", LLAMA3),
    "partial": ("phi", {**PLAIN, "partial_rotary_factor": 0.25}),
    "neox": ("gpt_neox", {**LINEAR, "partial_rotary_factor": 0.5}),
    "both kinds": ("gemma3_text", {"full_attention": PLAIN, "sliding_attention": LOCAL}),
    "by kind of layer": ("gemma3_text", {"full_attention": LINEAR, "sliding_attention": LOCAL}),
}  # fmt: skip
READ = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    ids = AutoTokenizer.from_pretrained(folder)("to be or not to be, that is it", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids %= model.config.vocab_size  # of a drafter of some tokens
    torch.save((ids, model(ids).logits), f"{folder}/read.pt")
"""


def save(folder: Path, family: str, rope: dict[str, Any]) -> Path:
    model = AutoModelForCausalLM.from_pretrained(save_family(folder / "newer", family, rope_parameters=rope))
    save_parts(folder / "both", model, byte_tokenizer())
    return folder / "both"


@pytest.mark.parametrize("case", CASES)
def test_version_5_reads_what_it_read(tmp_path: Path, case: str) -> None:
    """Also a second time, and nothing else in the config is changed."""
    family, rope = CASES[case]
    config, tokenizer = family_config(family, rope_parameters=rope), byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<x>"]})
    config.save_pretrained(tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    save_parts(tmp_path, config, tokenizer)
    for_older_readers(tmp_path)
    assert deciding_config(str(tmp_path), None) == {key: plain[key] for key in plain.keys() - NOT_DECIDING}
    described = json.loads((tmp_path / "config.json").read_text())
    assert {key: described[key] for key in plain} == plain
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}
    whole = rope.get("full_attention", rope)
    kind = described.get("rope_scaling", PLAIN)["rope_type"]
    theta = described["rotary_emb_base" if family == "gpt_neox" else "rope_theta"]
    assert (theta, kind) == (whole["rope_theta"], whole["rope_type"])
    (tmp_path / "config.json").write_text(
        json.dumps({**described, "rope_scaling": {"rope_type": "linear", "factor": 9.0}})
    )
    assert deciding_config(str(tmp_path), None)["rope_scaling"]["factor"] == 9  # version 5 reads it first
    (tmp_path / "config.json").write_text(json.dumps(described))
    read = load_tokenizer(str(tmp_path))
    assert (read.get_vocab(), read.all_special_tokens) == (tokenizer.get_vocab(), tokenizer.all_special_tokens)


@pytest.mark.engine
def test_version_4_reads_the_same_model(tmp_path: Path, written: Path) -> None:
    if not OLDER.exists():
        pytest.skip("make engines installs it")
    folders = {case: save(tmp_path / case, *of) for case, of in CASES.items()}
    newer = folders["plain"].parent / "newer"
    for name, source in ("converted", newer), ("gguf", written):
        folders[name] = tmp_path / "out" / name
        convert_target(ConvertConfig(target=str(source), out_dir=str(folders[name])))
    folders["shipped"] = tmp_path / "shipped"
    folders["shipped"].mkdir()
    for file in (ROOT / "drafters/smollm2/small_lm").iterdir():
        (folders["shipped"] / file.name).symlink_to(file)
    byte_tokenizer().save_pretrained(newer)
    for_older_readers(newer)  # its tokenizer alone can then be read: the planted fault
    config = AutoConfig.from_pretrained(newer)
    config.save_pretrained(newer)
    subprocess.run([OLDER, "-c", READ, *map(str, folders.values()), str(newer)], check=True)
    for name, folder in {**folders, "fault": newer}.items():
        ids, logits = torch.load(folder / "read.pt")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        same = torch.allclose(model(ids).logits, logits, atol=1e-3)
        assert same == (name != "fault"), name


def test_no_family_is_another_by_the_older_keys(tmp_path: Path) -> None:
    for family in FAMILIES:
        family_config(family).save_pretrained(tmp_path / family)
        before = AutoConfig.from_pretrained(tmp_path / family).to_dict()
        for_older_readers(tmp_path / family)
        assert AutoConfig.from_pretrained(tmp_path / family).to_dict().items() >= before.items()

"""The record: every arm on every prompt, kept prompt by prompt, one entry a dtype; and llama.cpp's part of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draft_models.checkpoint import save_pretrained
from draft_models.target.architectures import load_config
from draft_models.target.fingerprint import fingerprint_target
from draft_models.target.open_target import load_tokenizer, open_target
from draft_models.target.tensor_files import open_tensors
from outrider.errors import UserError
from tests.tiny import make_drafter, save_target

# In the place of the package: it counts on from the last token, and its "draft" is right about two tokens.
STAND_IN = """
__version__ = "0"
class Llama:
    def __init__(self, path, **options):
        assert open(path, "rb").read(4) == b"GGUF"
        self.drafts = options["draft_model"] is not None
        assert options["logits_all"] == self.drafts
        assert options["n_threads"] == options["n_threads_batch"]
        assert options["type_k"] == options["type_v"] == 0
    def reset(self):
        self.last = None
    def eval(self, tokens):
        self.last = tokens[-1]
    def generate(self, tokens, temp):
        assert temp == 0.0
        assert self.last is None
        self.eval(tokens)
        yield (self.last + 1) % 256
        while True:
            print("noise on the standard output")
            self.eval([(self.last + 1) % 256])
            for step in range(1, 4 if self.drafts else 2):
                yield (self.last + step) % 256
            self.last = self.last + step - 1
"""
SPECULATIVE = """
class LlamaDraftModel:
    pass
class LlamaPromptLookupDecoding(LlamaDraftModel):
    def __init__(self, max_ngram_size, num_pred_tokens):
        assert (max_ngram_size, num_pred_tokens) == (3, 4)
"""


def models(folder: Path) -> list[str]:
    """A target with two drafters in `folder`; the options that name them."""
    path = save_target(folder / "target", eos_token_id=257)
    save_target(folder / "small", seed=1)
    fingerprint = fingerprint_target(open_tensors(str(path)), load_config(str(path)), load_tokenizer(str(path)))
    save_pretrained(folder / "eesd", make_drafter(path, 2, noise=0.1), fingerprint, {}, torch.float32)
    (folder / "eesd" / "steps.json").write_text('{"minutes": 3, "seconds_per_step": 2, "steps": 90}')
    return [f"target={path}", f"checkpoint={folder / 'eesd'}", f"small_lm={folder / 'small'}"]


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def test_a_record_goes_on_and_has_an_entry_a_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_real
    from fill_tables import fill_record

    options = models(tmp_path)
    for name in ("one", "two"):
        lines = [json.dumps({"prompt": f"{name} {i}: "}) + "\n" for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        options += ["--prompts", f"{name}={tmp_path / name}.jsonl"]
    options[3:3] = ["method=[eesd_fixed,vanilla,prompt_lookup]", "max_new_tokens=12"]
    work = tmp_path / "work"

    def record(dtype: str, *more: str) -> dict[str, Any]:
        given = [f"dtype={dtype}", *options, "--per-category", "2", "--work", str(work), *more]
        monkeypatch.setattr(sys, "argv", ["bench_real.py", *given])
        bench_real.main()
        found: dict[str, Any] = json.loads((work / "record.json").read_text())["entries"]
        return found

    first = record("float32", "--minutes", "1e-9")["float32"]
    assert (first["prompts"], first["prompts_asked"]) == (1, 4)
    before = kept(work / "float32")
    assert len(before) == 1
    entry = record("float32")["float32"]
    assert kept(work / "float32")[:1] == before
    assert [line["turns"][0]["prompt_id"] for line in kept(work / "float32")] == [
        "one/1", "two/1", "one/3", "two/3",
    ]  # fmt: skip
    assert entry["prompts"] == 4
    assert entry["drafters"]["early_exit"]["training"]["steps"] == 90
    assert set(entry["arms"]) == {
        "autoregressive", "transformers_generate", "eesd_fixed", "vanilla", "prompt_lookup",
        *(f"transformers_assisted_{who}{how}" for who in ("early_exit", "small_lm") for how in ("", "_default")),
        "transformers_prompt_lookup",
    }  # fmt: skip
    for name, arm in entry["arms"].items():
        parts = arm["by_category"]
        assert arm["identical"] == 4, name
        assert set(parts) == {"one", "two"}
        assert sum(part["tokens"] for part in parts.values()) == arm["tokens"]
        low, high = arm["speedup"]["ci95"]
        assert low <= arm["speedup"]["median"] <= high
    assert entry["arms"]["autoregressive"]["speedup"]["ci95"] == [1, 1]
    assert entry["arms"]["transformers_generate"]["speedup"]["vs_transformers_generate"]["median"] == 1
    assert entry["arms"]["eesd_fixed"]["tau"] > 1
    found = record("bfloat16", "--minutes", "1e-9")
    assert found["float32"] == entry
    assert found["bfloat16"]["prompts"] == 1
    assert found["bfloat16"]["arms"]["vanilla"]["judged"]["positions"] > 0
    page = "a\n<!-- float32 table: begin -->\nold\n<!-- float32 table: end -->\nb\n"
    filled = fill_record(page, found)
    assert filled == fill_record(filled, found)
    assert (filled[:2], filled[-2:]) == ("a\n", "b\n")
    assert "old" not in filled
    for name, arm in entry["arms"].items():
        assert f"| {name} | 4/4 | " in filled
        assert f"| {arm['tokens_per_second']:.1f} | {arm['speedup']['median']:.2f}× [" in filled
        two = arm["by_category"]["two"]
        assert f", {two['speedup']['median']:.2f}× |\n" in filled
    with pytest.raises(ValueError, match="no place for bfloat16"):
        fill_record(page, {"bfloat16": found["bfloat16"]})
    options[3] = "method=[vanilla]"
    with pytest.raises(SystemExit):  # results of other methods are there
        record("float32")


def test_llama_cpp_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peer_llamacpp import llama_server, llama_version

    from outrider.streams import Streams

    with pytest.raises(UserError, match=r"llama_cpp.*pip install llama-cpp-python"):
        llama_version(sys.executable)
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "llama_cpp" / "llama_speculative.py").write_text(SPECULATIVE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert llama_version(sys.executable) == "0"
    target = open_target(str(save_target(tmp_path / "target")))
    asked = {"positions": 64, "threads": 1, "draft_tokens": 4}
    with llama_server(sys.executable, tmp_path / "files", target, None, torch.float32, **asked) as server:
        assert server.arms == ["llama_cpp", "llama_cpp_prompt_lookup"]
        plain, looking = (
            server.arm(name, eos, 6)([5, 9], Streams(0))
            for name, eos in (("llama_cpp", ()), ("llama_cpp_prompt_lookup", (13,)))
        )
    assert plain.tokens == (10, 11, 12, 13, 14, 15)
    assert [r.tokens for r in plain.rounds] == [(token,) for token in plain.tokens[1:]]
    assert looking.tokens == (10, 11, 12, 13)
    assert [r.tokens for r in looking.rounds] == [(11, 12, 13)]
    assert plain.prefill_seconds > 0
    assert plain.decode_seconds == pytest.approx(sum(r.seconds for r in plain.rounds))
    assert server.process.poll() == 0
    assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_has_the_weights(tmp_path: Path, tied: bool) -> None:
    """All of them, queries and keys in the order in which llama.cpp rotates them."""
    gguf = pytest.importorskip("gguf")
    from peer_llamacpp import weights_of, write_gguf

    path = save_target(tmp_path / "target", tied=tied, kv_heads=2)
    target = open_target(str(path))
    reader = gguf.GGUFReader(write_gguf(target, tmp_path / "model.gguf", torch.float32))
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    assert ("output.weight" in stored) == (not tied)
    weights = load_file(path / "model.safetensors")
    heads, name = target.config.num_attention_heads, "self_attn.q_proj.weight"
    rows = weights[f"model.layers.1.{name}"].unflatten(0, (heads, -1))
    half = rows.shape[1] // 2
    pairs = stored["blk.1.attn_q.weight"].unflatten(0, (heads, -1))
    for i in range(half):  # llama.cpp turns rows 2i and 2i + 1 together, transformers i and i + half
        assert torch.equal(pairs[:, 2 * i], rows[:, i])
        assert torch.equal(pairs[:, 2 * i + 1], rows[:, i + half])
    assert torch.equal(stored["blk.1.ffn_down.weight"], weights["model.layers.1.mlp.down_proj.weight"])
    assert len(stored) == len(list(weights_of(weights, target.config)))

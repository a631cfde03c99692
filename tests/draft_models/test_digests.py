"""Digests of stored tensors: what a sample sees, what it costs, and that all bytes are seen where it matters."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draft_models.early_exit.checkpoint import parts_below
from draft_models.targets.architectures import load_config
from draft_models.targets.tensor_files import open_tensors
from tests.tiers import as_many
from tests.tiny import save_target

SAMPLE = 2**14  # bytes read of a tensor that is larger


def digests(folder: Path, tensors: dict[str, torch.Tensor], whole: bool = False) -> tuple[dict[str, str], int]:
    """What `digests` says of a checkpoint with these tensors, and how many bytes it has read."""
    save_file(tensors, folder / "model.safetensors")
    files = open_tensors(str(folder))
    found = files.digests(files.file_of, whole=whole)
    assert files.bytes_read == 0  # hashing is not loading
    return found, files.bytes_hashed


@settings(max_examples=as_many(60), deadline=None)
@given(rows=st.integers(1, 400), columns=st.integers(1, 400), begin=st.floats(0, 1), share=st.floats(0, 1))
def test_a_sample_sees_what_is_not_small_and_in_one_place(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, begin: float, share: float
) -> None:
    """Changed is one stretch of one tensor as long as the gap between two pieces; of a small tensor, one byte."""
    folder = tmp_path_factory.mktemp("sample")
    before = torch.zeros(rows, columns, dtype=torch.uint8)
    size = before.numel()
    gap = 1 if size <= SAMPLE else -(-size // 31)
    length = gap + int(share * (size - gap))
    after, start = before.clone(), int(begin * (size - length))
    after.view(-1)[start : start + length] = 1
    sampled, read = digests(folder, {"model.x.weight": before})
    assert read == min(size, SAMPLE)
    assert sampled != digests(folder, {"model.x.weight": after})[0]


def test_whole_means_every_byte(tmp_path: Path) -> None:
    before = torch.zeros(5 * 2**20 + 3, dtype=torch.uint8)  # more than is hashed at once
    whole, read = digests(tmp_path, {"model.x.weight": before}, whole=True)
    assert read == before.numel()
    for at in (0, 2**22 - 1, 2**22, before.numel() - 1):
        after = before.clone()
        after[at] = 1
        assert digests(tmp_path, {"model.x.weight": after}, whole=True)[0] != whole


def test_digests_are_by_part_and_of_name_type_and_shape_too(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(8, 4), "model.layers.10.mlp.weight": torch.ones(8, 4)}
    tensors |= {"model.layers.1.norm.weight": torch.ones(4), "model.layers.1.norm.bias": torch.ones(4)}
    tensors |= {"lm_head.weight": torch.tensor(1.0), "model.norm.weight": torch.empty(0)}
    parts, _ = digests(tmp_path, tensors)
    assert parts.keys() == {"model.embed_tokens", "model.layers.10", "model.layers.1", "lm_head", "model.norm"}
    assert len(set(parts.values())) == len(parts)
    name, part = "model.layers.1.norm.bias", "model.layers.1"
    for other in (torch.ones(2, 2), torch.ones(4).view(torch.int32), torch.ones(4) + 1e-6):
        changed, _ = digests(tmp_path, {**tensors, name: other})
        assert {key for key in parts if parts[key] != changed[key]} == {part}
    del tensors[name]
    assert digests(tmp_path, tensors)[0][part] != parts[part]


def test_a_large_targets_digests_cost_little(tmp_path: Path) -> None:
    """Of each matrix of a megabyte 16 kB are read; what training reads is read whole, and nothing else."""
    path = save_target(tmp_path, hidden_size=512, intermediate_size=512)
    config, files = load_config(str(path)), open_tensors(str(path))
    sizes = {name: tensor.nbytes for name, tensor in load_file(path / "model.safetensors").items()}
    files.digests(files.file_of)
    assert files.bytes_hashed == sum(min(size, SAMPLE) for size in sizes.values()) < sum(sizes.values()) / 30
    files.bytes_hashed = 0
    parts_below(files, config, 1)
    middle = ("model.layers.1.", "model.layers.2.")
    assert files.bytes_hashed == sum(size for name, size in sizes.items() if not name.startswith(middle))

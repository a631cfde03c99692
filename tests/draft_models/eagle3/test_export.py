"""EAGLE-3 heads written in a dialect and read again: the same, or refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from draft_models.eagle3.checkpoint import load_head, make_head, open_head, save_head
from draft_models.eagle3.model import Eagle3
from draft_models.targets.settings import Written
from outrider.errors import UserError
from tests.eagle3_heads import DIALECTS, TARGET, head_weights, write_head

WRITTEN = get_args(Written)


def loaded(tmp_path: Path, dialect: str) -> Eagle3:
    facts = DIALECTS[dialect]
    return load_head(write_head(tmp_path / dialect, facts, head_weights(facts)), TARGET, dtype=torch.bfloat16)


def refusal(path: Path, head: Eagle3, dialect: str) -> str:
    """Why `head` cannot be saved so; nothing where it was."""
    try:
        save_head(path, head, dialect, TARGET, "someone/target")  # type: ignore[arg-type]
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_gives_back_what_was_written(tmp_path: Path, dialect: str) -> None:
    """Every bit of it, in each dialect that has words for it; of EAGLE's bias and ModelOpt's switches none has."""
    head = loaded(tmp_path, dialect)
    able = {"specforge": {*WRITTEN}, "speculators": {"speculators"}}.get(dialect, set())
    written = set()
    for other in WRITTEN:
        said = refusal(tmp_path / "out" / other, head, other)
        if said:
            assert f"dialect={other}: has no word for " in said
            assert not (tmp_path / "out" / other).exists()
            continue
        written.add(other)
        stored = open_head(str(tmp_path / "out" / other), TARGET)
        assert (stored.dialect, stored.reading) == (other, head.reading)
        again = load_head(str(tmp_path / "out" / other), TARGET, dtype=torch.bfloat16)
        assert again.state_dict().keys() == head.state_dict().keys()
        for name, tensor in head.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor)
    assert written == able


def test_a_plain_head_goes_into_every_dialect(tmp_path: Path) -> None:
    """EAGLE's first kind, without a switch: each dialect has words for it."""
    exotic = DIALECTS["eagle"]
    facts = replace(exotic, on=frozenset(), config={**exotic.config, "bias": False})
    head = load_head(write_head(tmp_path / "head", facts, head_weights(facts)), TARGET, dtype=torch.float32)
    for dialect in WRITTEN:
        assert not refusal(tmp_path / dialect, head, dialect)
        again = load_head(str(tmp_path / dialect), TARGET, dtype=torch.float32)
        assert again.reading == head.reading
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


def test_files_are_as_their_readers_expect(tmp_path: Path) -> None:
    """Names, offsets, and taps as outputs of layers or as boundaries."""
    head = loaded(tmp_path, "specforge")
    for dialect, prefix in (("specforge", "midlayer."), ("speculators", "layers.0.")):
        save_head(tmp_path / dialect, head, dialect, TARGET, "someone/target")  # type: ignore[arg-type]
        tensors = load_file(tmp_path / dialect / "model.safetensors")
        expected = head_weights(DIALECTS["specforge"])
        assert set(tensors) == {name.replace("midlayer.", prefix) for name in expected}
        assert torch.equal(tensors["d2t"], expected["d2t"])
        assert torch.equal(tensors["t2d"], expected["t2d"])
    own, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("specforge", "speculators"))
    assert own["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert own["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]  # vLLM looks at the top, and takes boundaries
    assert other["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert other["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    assert "target_hidden_size" not in own  # as wide as the target
    assert own["norm_output"] == own["fc_norm"] == other["norm_output"] == other["fc_norm"] is True


def test_another_reading_of_the_same_tensors_is_another_head(tmp_path: Path) -> None:
    """What a doctor tries; ids that were read as an index are written as offsets."""
    facts = DIALECTS["speculators"]
    weights = head_weights(facts)
    ids = torch.tensor(facts.draft_tokens)
    stored = open_head(write_head(tmp_path / "a", facts, {**weights, "d2t": ids}), TARGET)
    tensors = stored.tensors(torch.float32)
    with pytest.raises(UserError, match="It holds offsets"):
        make_head(stored.reading, tensors, stored.source)
    head = make_head(replace(stored.reading, draft_ids="index"), tensors, stored.source)
    save_head(tmp_path / "b", head, "speculators", TARGET, "someone/target")
    assert torch.equal(load_file(tmp_path / "b" / "model.safetensors")["d2t"], weights["d2t"])
    other = make_head(replace(head.reading, norm_before_residual=False), tensors, stored.source)
    outputs = []
    for one in (head, other):
        one.reserve(4)
        features = one.features(torch.ones(1, 4, one.fc.in_features))
        masks = dict.fromkeys(one.windows)
        outputs.append(one.run(torch.arange(4)[None], features, masks, one.rotary(torch.arange(4)[None])))
    assert not torch.allclose(*outputs)

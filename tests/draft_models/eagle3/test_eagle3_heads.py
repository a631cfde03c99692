"""EAGLE-3 heads of every dialect: what they compute, which files are refused, and what is written and read again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.base.errors import UserError
from outrider.draft_models.eagle3.checkpoint import open_head, save_head
from outrider.draft_models.eagle3.dialects import config_in_dialect
from outrider.draft_models.eagle3.model import Eagle3, Steps
from outrider.draft_models.heads.joint import attend_jointly
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.settings import ReadingChanges, WrittenDialect
from outrider.draft_models.targets.target import Band
from outrider.train.toy_target import packed_mask
from tests.eagle3_heads import DIALECTS, TARGET, TARGET_WIDTH, VOCABULARY, Row, head_weights, reference, write_head
from tests.refusals import refusal

PLACES = 5  # of a text


class Growing:
    """Keys and values of all passes, concatenated."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        before = self.held.get(layer_idx)
        if before is not None:
            key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
        self.held[layer_idx] = (key, value)
        return key, value


def masks(head: Eagle3, rows: list[Row], start: int) -> dict[int | None, Tensor]:
    """The masks of rows from `start` on, by window."""
    seen = torch.zeros(len(rows) - start, len(rows), dtype=torch.bool)
    for number, row in enumerate(rows[start:]):
        seen[number, [*row.sees, start + number]] = True
    places = torch.tensor([row.position for row in rows])
    distance = places[start:, None] - places
    return {w: (seen if w is None else seen & (distance < w))[None, None] for w in head.windows}


@torch.inference_mode()
def logits_of(head: Eagle3, rows: list[Row]) -> Tensor:
    """Logits [rows, V]: first the rows with the target's features in one pass, then all others over their cache."""
    true = [row for row in rows if isinstance(row.feature, Tensor)]
    head.reserve(1 + max(row.position for row in rows))
    cache, outputs = Growing(), torch.zeros(1, 0, head.reading.hidden)
    features = head.features(torch.stack([row.feature.flatten() for row in true])[None])  # type: ignore[union-attr]
    for start, end in ((0, len(true)), (len(true), len(rows))):
        now = rows[start:end]
        if start:
            features = outputs[:, [row.feature for row in now]]
        tokens, positions = (torch.tensor([[getattr(r, name) for r in now]]) for name in ("token", "position"))
        seen = masks(head, rows[:end], start)
        outputs = torch.cat([outputs, head.run(head.embed(tokens), features, seen, head.rotary(positions), cache)], 1)
    return head.logits(outputs)[0]


def two_steps() -> list[Row]:
    """Two steps of training-time test: the second attends to the first step's past, and to its own index only."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (PLACES + 1,)).tolist()
    first = [Row(tokens[t], t, range(t), 2 * torch.randn(3, TARGET_WIDTH)) for t in range(PLACES)]
    return [*first, *(Row(tokens[t + 1], t + 1, range(t + 1), t) for t in range(PLACES))]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_it_gives_what_its_description_says(tmp_path: Path, dialect: str) -> None:
    """With features of the target and with its own; logits over its draft vocabulary only."""
    facts = DIALECTS[dialect]
    weights = head_weights(facts)
    source = write_head(tmp_path, facts, weights)
    stored = open_head(source, TARGET)
    assert (stored.dialect, stored.reading.taps) == (dialect, facts.taps)
    head = stored.load(torch.float32)
    embedding = weights.get("embed_tokens.weight")
    if embedding is None:
        embedding = torch.randn(VOCABULARY, TARGET_WIDTH)
        head.use_embedding(embedding)
    taps = len(facts.taps)
    rows = [Row(r.token, r.position, r.sees, r.feature if type(r.feature) is int else r.feature[:taps])  # type: ignore[index]
            for r in two_steps()]  # fmt: skip
    expected = torch.stack(reference(facts, weights, embedding, rows))
    given = logits_of(head, rows)
    torch.testing.assert_close(given[:, list(facts.draft_tokens)], expected, rtol=1e-4, atol=1e-4)
    outside = [token for token in range(VOCABULARY) if token not in facts.draft_tokens]
    assert given.isfinite().all()
    assert given.softmax(-1)[:, outside].sum() == 0


def refused(tmp_path: Path, dialect: str, weights: dict[str, Tensor], **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        open_head(write_head(tmp_path, DIALECTS[dialect], weights, **changes), TARGET).load(torch.float32)
    return str(caught.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_tensor_too_few_or_too_many_is_named(tmp_path: Path, dialect: str) -> None:
    """For every tensor, by its name in the file; except t2d, which is redundant."""
    facts = DIALECTS[dialect]
    weights = head_weights(facts)
    names = [f"{facts.prefix}self_attn.o_proj.weight", f"{facts.prefix}input_layernorm.weight", "norm.weight",
             "lm_head.weight", "fc.weight", "d2t", f"{facts.prefix}self_attn.q_norm.weight", "fc_norm.1.weight",
             f"{facts.prefix}self_attn.k_proj.bias", "input_norm.weight", "layers.1.mlp.up_proj.weight"]  # fmt: skip
    for name in names:
        if name in weights:
            said = refused(tmp_path, dialect, {key: tensor for key, tensor in weights.items() if key != name})
            assert f"missing tensors: {name}." in said
    assert len(set(names) & weights.keys()) >= 4
    said = refused(tmp_path, dialect, {**weights, f"{facts.prefix}mask_hidden": torch.ones(1)})
    assert f"unknown tensors: {facts.prefix}mask_hidden." in said
    said = refused(tmp_path, dialect, {**weights, "fc.weight": weights["fc.weight"][:, 1:]})
    assert "tensor fc.weight has shape" in said
    open_head(write_head(tmp_path, facts, {key: tensor for key, tensor in weights.items() if key != "t2d"}), TARGET)


def test_a_map_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    weights = head_weights(DIALECTS["specforge"])
    offsets, member = weights["d2t"], weights["t2d"]
    last = len(offsets) - 1
    beyond = {"d2t": offsets + torch.eye(last + 1, dtype=torch.long)[last]}
    said = refused(tmp_path, "specforge", {**weights, **beyond})
    assert f"makes draft token {last} the target's token {VOCABULARY}" in said
    index = {"d2t": offsets + torch.arange(last + 1)}  # its value as an index instead of an offset
    assert "expected ascending ones, 0 to 39. It holds offsets" in refused(tmp_path, "specforge", {**weights, **index})
    assert "expected ascending ones" in refused(tmp_path, "specforge", {**weights, "d2t": offsets.flip(0)})
    unset = {"d2t": torch.zeros_like(offsets), "t2d": torch.ones_like(member)}
    assert "d2t and t2d name other tokens (8 and 40)" in refused(tmp_path, "specforge", {**weights, **unset})
    said = refused(tmp_path, "specforge", {**weights, "d2t": offsets.float()})
    assert "d2t holds torch.float32: expected integers" in said


def eagle_config(**changes: Any) -> dict[str, Any]:
    return {"eagle_config": {**DIALECTS["specforge"].config["eagle_config"], **changes}}


TAPS = "eagle_aux_hidden_state_layer_ids"
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "another width": ("eagle", {"target_hidden_size": 32}, "hidden=16: expected target_hidden=32, or an embedding"),
    "another vocabulary": ("eagle", {"vocab_size": 41}, "with vocab_size=41 .vocab_size., this one has vocab_size=40"),
    "a tap beyond": ("speculators", {TAPS: [0, 4, 9]}, r"boundaries \[0, 4, 9\], but expected are 0 to 8"),
    "taps at odds": ("specforge", {TAPS: [0, 3, 6]}, r"eagle_config.*=\[0, 3, 6\] means boundaries \[1, 4, 7\]"),
    "switches at odds": ("specforge", eagle_config(norm_output=False), "norm_output=True at the top, False in"),
    "parallel": ("specforge", eagle_config(parallel_draft_step=4), "several tokens drafted at once"),
    "another layer": ("eagle", {"model_type": "gpt2"}, "model_type='gpt2': a head has layers of one of llama, qwen3"),
    "an unsteady rope": ("eagle", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    "no last norm": ("specforge", eagle_config(use_last_layernorm=False), "expected false where final_norm is false"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_before_weights_are_read(tmp_path: Path, case: str) -> None:
    dialect, changes, said = WRONG[case]
    facts = DIALECTS[dialect]
    refusal(said, open_head, write_head(tmp_path, facts, head_weights(facts), **changes), TARGET)


@pytest.mark.parametrize(("dialect", "switch"), [("specforge", "fc_norm"), ("speculators", "norm_before_fc")])
def test_a_switch_that_is_left_out_is_seen_in_the_tensors(tmp_path: Path, dialect: str, switch: str) -> None:
    facts = DIALECTS[dialect]
    config = {name: value for name, value in facts.config.items() if name != switch}
    said = open_head(write_head(tmp_path / "said", facts, head_weights(facts)), TARGET)
    again = open_head(write_head(tmp_path, replace(facts, config=config), head_weights(facts)), TARGET)
    assert again.reading == said.reading


def test_aux_hidden_states_by_the_names_of_servers(tmp_path: Path) -> None:
    """layer_ids of eagle_config are boundaries, as in vLLM; the norms' first names of SGLang are known."""
    facts = DIALECTS["specforge"]
    weights = head_weights(facts)
    head = open_head(write_head(tmp_path / "a", facts, weights), TARGET)
    places = dict(zip(("0", "1", "2"), ("low", "mid", "high"), strict=True))
    former = {
        f"aux_norm_{places[name.split('.')[1]]}.weight" if name.startswith("fc_norm.") else name: tensor
        for name, tensor in weights.items()
    }
    assert former.keys() != weights.keys()
    config = {key: value for key, value in facts.config["eagle_config"].items() if key != TAPS}
    changes = {"eagle_config": {**config, "layer_ids": [1, 4, 7]}, "use_aux_norm": True}
    named = write_head(tmp_path / "b", facts, former, **changes)
    assert open_head(named, TARGET).reading == head.reading
    of_deepspec = {"eagle_config": config, TAPS: None, "target_layer_ids": [0, 3, 6]}
    assert open_head(write_head(tmp_path / "c", facts, weights, **of_deepspec), TARGET).reading == head.reading


def test_a_reading_rescues_a_config_that_says_nothing_sound(tmp_path: Path) -> None:
    """Contradictory aux hidden states, and a tensor that the config excludes; without the reading both are refused."""
    facts = DIALECTS["specforge"]
    weights, sound = head_weights(facts), ReadingChanges(taps=(1, 4, 7), tap_norms=True)
    where = write_head(tmp_path, facts, weights, **{TAPS: [0, 3, 6]}, fc_norm=False)
    for changes in (ReadingChanges(), ReadingChanges(taps=(1, 4, 7)), ReadingChanges(tap_norms=True)):
        refusal("eagle3=", open_head, where, TARGET, changes=changes)
    found = open_head(where, TARGET, changes=sound)
    assert found.reading == open_head(write_head(tmp_path / "sound", facts, weights), TARGET).reading
    assert torch.equal(found.load(torch.float32).state_dict()["fc_norm.0.weight"], weights["fc_norm.0.weight"].float())


WRITTEN = get_args(WrittenDialect)


def loaded(tmp_path: Path, dialect: str) -> Eagle3:
    """plain: EAGLE's first kind, without a switch."""
    exotic = DIALECTS["eagle"]
    plain = replace(exotic, on=frozenset(), config={**exotic.config, "bias": False})
    facts = plain if dialect == "plain" else DIALECTS[dialect]
    return open_head(write_head(tmp_path / dialect, facts, head_weights(facts)), TARGET).load(torch.bfloat16)


def why_not_saved(path: Path, head: Eagle3, dialect: str) -> str:
    """Why `head` cannot be saved so; nothing where it was."""
    try:
        save_head(path, head, dialect, TARGET, "someone/target")  # type: ignore[arg-type]
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dialect", [*DIALECTS, "plain"])
def test_a_dialect_gives_back_what_was_written(tmp_path: Path, dialect: str) -> None:
    """Every bit of it, in each dialect that has words for it; of EAGLE's bias and ModelOpt's switches none has."""
    head = loaded(tmp_path, dialect)
    able = {"specforge": {*WRITTEN}, "speculators": {"speculators"}, "plain": {*WRITTEN}}.get(dialect, set())
    written = set()
    for other in WRITTEN:
        said = why_not_saved(tmp_path / "out" / other, head, other)
        if said:
            assert f"dialect={other}: has no word for " in said
            assert not (tmp_path / "out" / other).exists()
            continue
        written.add(other)
        stored = open_head(str(tmp_path / "out" / other), TARGET)
        assert (stored.dialect, stored.reading) == (other, head.reading)
        torch.testing.assert_close(stored.load(torch.bfloat16).state_dict(), head.state_dict(), rtol=0, atol=0)
    assert written == able


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
    more = config_in_dialect(replace(head.reading, taps=(1, 2, 4, 7)), "speculators", TARGET, "", drafted=1)
    assert more["transformer_layer_config"]["num_aux_hidden_states"] == 4  # vLLM looks there
    assert "target_hidden_size" not in own  # as wide as the target
    assert own["norm_output"] == own["fc_norm"] == other["norm_output"] == other["fc_norm"] is True


def test_another_reading_of_the_same_tensors_is_another_head(tmp_path: Path) -> None:
    """What a doctor tries; ids that were read as an index are written as offsets."""
    facts = DIALECTS["speculators"]
    weights = head_weights(facts)
    ids = torch.tensor(facts.draft_tokens)
    stored = open_head(write_head(tmp_path / "a", facts, {**weights, "d2t": ids}), TARGET)
    tensors = stored.tensors(torch.float32)
    refusal("It holds offsets", stored.make, stored.reading, tensors)
    head = stored.make(replace(stored.reading, draft_ids="index"), tensors)
    save_head(tmp_path / "b", head, "speculators", TARGET, "someone/target")
    assert torch.equal(load_file(tmp_path / "b" / "model.safetensors")["d2t"], weights["d2t"])
    other = stored.make(replace(head.reading, norm_before_residual=False), tensors)
    outputs = []
    for one in (head, other):
        one.reserve(4)
        features = one.features(torch.ones(1, 4, one.fc.in_features))
        masks = dict.fromkeys(one.windows)
        outputs.append(one.run(one.embed(torch.arange(4)[None]), features, masks, one.rotary(torch.arange(4)[None])))
    assert not torch.allclose(*outputs)


HEADS, KEY_HEADS, LENGTH, WIDTH, STEPS = 4, 2, 13, 8, 4
DOCUMENTS = torch.tensor([[0] * 6 + [1] * 5 + [-1] * 2, [0] * 13])
SCALING = 0.3


def made() -> list[list[Tensor]]:
    """Queries, keys and values of each step, large enough that weights are far from equal."""
    generator = torch.Generator().manual_seed(0)

    def some(heads: int) -> Tensor:
        values = torch.randn(2, heads, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        return (3 * values).requires_grad_()

    return [[some(HEADS), some(KEY_HEADS), some(KEY_HEADS)] for _ in range(STEPS)]


def plain(parts: list[list[Tensor]]) -> Tensor:
    """Over the keys of all steps side by side, under a mask of all of them."""
    seen, found = packed_mask(DOCUMENTS), []
    for step, (query, _, _) in enumerate(parts):
        keys, values = (torch.cat([part[i] for part in parts[: step + 1]], 2) for i in (1, 2))
        own = torch.eye(LENGTH, dtype=torch.bool).expand(*seen.shape[:2], -1, -1)
        mask = torch.cat([seen, *[own] * step], -1)
        keys, values = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (keys, values))
        scores = (query @ keys.mT * SCALING).masked_fill(~mask, -torch.inf)
        found.append((scores.softmax(-1) @ values).transpose(1, 2))
    return torch.stack(found)


def joined(parts: list[list[Tensor]]) -> Tensor:
    steps, found, mask = Steps(), [], packed_band(DOCUMENTS, band_class=type("Small", (Band,), {"BLOCK": 5}))
    for step, (query, key, value) in enumerate(parts):
        steps.step = step
        found.append(steps.attend(nn.Identity(), query, (key, value), mask, 0, SCALING))
    return torch.stack(found)


def test_values_and_gradients_are_those_of_one_softmax() -> None:
    found = []
    for given in (plain, joined):
        parts = made()
        out = given(parts)
        out.sin().sum().backward()
        found.append([out, *(tensor.grad for step in parts for tensor in step)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)


def test_sixteen_bits_do_not_round_the_joint_score() -> None:
    """Two entries of one key share the weight evenly, also where their score is too large for its fractions."""
    key = 4 * torch.randn(1, 1, LENGTH, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = packed_band(torch.arange(LENGTH)[None])
    one = torch.ones_like(key)
    own = key.transpose(1, 2)[..., None, :], one.transpose(1, 2)[..., None, :]
    found = attend_jointly(nn.Identity(), key, (key, 0 * one), own, mask, scaling=0.3)
    torch.testing.assert_close(found, 0.5 * one.transpose(1, 2), rtol=0, atol=0.01)

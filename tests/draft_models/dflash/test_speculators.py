"""Block drafters that speculators makes and writes compute here what they compute there, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from outrider.draft_models.dflash.blocks import run_blocks
from outrider.draft_models.dflash.checkpoint import open_drafter
from tests.block_drafters import DRAFT_TOKENS, LAYER, MASK, RANK, TARGET, VOCABULARY, WIDTH

pytest.importorskip("speculators", reason="pip install speculators --no-deps (0.9.0 was tested)")
LENGTH, TAPS = 21, (0, 2, 5)
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, a sliding layer": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
    "dflash, sliding both ways": {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "sliding_window_non_causal": True,
    },
    "dspark": {"markov_rank": RANK, "confidence_head_with_markov": True},
    "dspark, some tokens": {"draft_vocab_size": len(DRAFT_TOKENS), "markov_rank": RANK},
}  # fmt: skip


def made_there(path: Path, name: str) -> Any:
    """The model, saved by its own writer; weights are random, those of the target too."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    changes, of_layers = dict(KINDS[name]), ("layer_types", "sliding_window")
    layer = Qwen3Config(
        **LAYER, **{key: changes.pop(key) for key in of_layers if key in changes},
        use_sliding_window="sliding" in name, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    layer._attn_implementation = "eager"
    algorithm = name.partition(",")[0]
    config_type = DSparkSpeculatorConfig if algorithm == "dspark" else DFlashSpeculatorConfig
    config = config_type(
        transformer_layer_config=layer, block_size=4, aux_hidden_state_layer_ids=[*TAPS], mask_token_id=MASK,
        **{"draft_vocab_size": VOCABULARY, **changes},
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )  # fmt: skip
    torch.manual_seed(0)
    model = (DSparkDraftModel if algorithm == "dspark" else DFlashDraftModel)(config)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape) * weight.shape[-1] ** -0.5 + (weight.dim() == 1)
    if model.use_draft_vocab:
        ids = torch.tensor(DRAFT_TOKENS)
        model.load_vocab_mappings(torch.zeros(VOCABULARY).bool().index_fill(0, ids, True), ids - torch.arange(len(ids)))
    model.save_pretrained(str(path))
    return model.eval()


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_hidden_states_and_logits_are_those_of_the_writer(tmp_path: Path, name: str) -> None:
    model = made_there(tmp_path, name)
    drafter = open_drafter(str(tmp_path), TARGET).load(torch.float32)
    drafter.use_embedding(model.embed_tokens.weight)
    if not drafter.reading.own_head:
        drafter.use_head(model.lm_head)
    tokens, aux = torch.randint(VOCABULARY, (1, LENGTH)), torch.randn(1, LENGTH, len(TAPS) * WIDTH)
    count = LENGTH - 4
    hidden, logits, *_, at = model._backbone_forward(
        aux, tokens, torch.ones(1, LENGTH), torch.randn(1, LENGTH, WIDTH), torch.zeros(1, LENGTH, dtype=torch.long),
        max_anchors=count,
    )  # fmt: skip
    anchors = at.view(count, 4)[:, 0]
    assert anchors.tolist() == [*range(count)]
    found = run_blocks(drafter, aux, anchors[1:], tokens[0, anchors[1:]])  # the first one has no context
    torch.testing.assert_close(found, hidden.view(count, 4, -1)[1:], rtol=1e-4, atol=1e-4)
    before = tokens[0, at].view(count, 4)[1:]
    expected = logits.view(count, 4, -1)[1:]
    if name.startswith("dspark"):
        expected = expected + model.markov_head.block_bias(prev_token_ids=before, hidden_states=found)
        evidence = torch.cat([found, model.markov_head.prev_embeddings(before)], -1)
        assert drafter.confidence_head is not None
        ours = drafter.confidence_head(None, drafter.evidence(found, before))
        torch.testing.assert_close(ours, model.confidence_head(evidence), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drafter.bias(drafter.draft_logits(found), before), expected, rtol=1e-4, atol=1e-4)
    assert drafter.reading.drafted == (4 if name.startswith("dspark") else 3)

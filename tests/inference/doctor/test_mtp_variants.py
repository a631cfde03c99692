"""An MTP head with each known mistake of such heads: the doctor names every one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.base.errors import UserError
from outrider.draft_models.eagle3.checkpoint import head_shapes
from outrider.draft_models.mtp.model import MtpHead
from outrider.draft_models.mtp.reading import read_shapes
from outrider.draft_models.targets.open_target import OpenTarget, open_target
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.doctor.examine import compare_variants, score_variants
from outrider.inference.doctor.examinees import EXAMINERS
from outrider.inference.doctor.scores import Findings, Recording, refuse_reading
from tests.inference.doctor.fitted import learn, recordings, save_plain_target
from tests.mtp_heads import write_head
from tests.tiny import open_stack

STORED = {  # by spelling: what stands before names, and names by those of the module
    "qwen": ("mtp.", {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}),
    "speculators": ("mtp_layers.0.", {
        "fc": "input_proj", "embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm",
        "norm": "final_layernorm",
    }),
    "deepseek": ("model.layers.4.", {
        "fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm",
        "lm_head": "shared_head.head",
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Ward:
    """A target whose final norm matters, and heads that predict its answers."""

    target: OpenTarget
    stack: LayerStack
    texts: list[Recording]

    def trained(self, **changes: Any) -> dict[str, Tensor]:
        """The weights of a head that was trained by the usual reading, with `changes`."""
        reading = replace(read_shapes({"fc.weight": (64, 128)}, self.target.config, "qwen"), **changes)
        generator = torch.Generator().manual_seed(0)
        weights: dict[str, Tensor] = {}
        for name, shape in head_shapes(reading, MtpHead).items():
            noise = torch.randn(shape, generator=generator)
            weights[name] = (
                noise * shape[-1] ** -0.5
                if len(shape) == 2
                else torch.exp((2 if name == "norm.weight" else 0.7) * noise)
            )
        weights["fc.weight"][:, 64:] *= 5  # so that the head needs its own output, which the text hardly replaces
        head = MtpHead.of(reading, weights)
        head.use_target(self.stack)
        learn(head, self.texts, 40)
        return {name: tensor.detach() for name, tensor in head.state_dict().items()}

    @cached_property
    def usual(self) -> dict[str, Tensor]:
        return self.trained()

    def examined(self, where: str) -> Findings:
        examinee = EXAMINERS["mtp"](None, where, self.target, self.stack, ReadingChanges())
        return compare_variants(examinee, score_variants(self.texts, {"mtp": examinee})["mtp"])


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Ward:
    path = tmp_path_factory.mktemp("ward") / "target"
    save_plain_target(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        noise = torch.randn(64, generator=torch.Generator().manual_seed(1))
        model.model.norm.weight.mul_(torch.exp(noise))
    model.save_pretrained(path)
    stack = open_stack(path)[1]
    return Ward(open_target(str(path)), stack, recordings(stack))


def write(folder: Path, weights: dict[str, Tensor], spelling: str = "qwen") -> str:
    prefix, names = STORED[spelling]
    stored = {}
    for name, tensor in weights.items():
        stem = name.removesuffix(".weight")
        in_layer = stem if spelling == "qwen" else stem.removeprefix("layers.0.")
        stored[f"{prefix}{names.get(stem, in_layer)}.weight"] = tensor
    return write_head(folder, spelling, stored)


def swapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "fc.weight": weights["fc.weight"].roll(64, 1)}


def minus_one(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor - 1 if "norm" in name else tensor for name, tensor in weights.items()}


def random_rows(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    rows = torch.randn(260, 64, generator=torch.Generator().manual_seed(3))
    return lambda weights: {**weights, f"{name}.weight": rows.clone()}


Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]
MISREAD: dict[str, tuple[dict[str, Any], Edit, str, str]] = {  # training, file, its spelling; the right option
    "the other order": ({}, swapped, "qwen", "reading.hidden_first=true"),
    "factors minus 1": ({}, minus_one, "qwen", "reading.norm_offset=true"),
    "after the final norm": ({}, dict, "speculators", "reading.target_norm=true"),
    "a random embedding": ({}, random_rows("embed_tokens"), "qwen", "reading.own_embedding=false"),
    "a random head": ({}, random_rows("lm_head"), "deepseek", "reading.own_head=false"),
    "fed back before the norm": ({"norm_output": False}, dict, "qwen", "reading.norm_output=false"),
    "another rope": (
        {"rope": {"rope_type": "default", "rope_theta": 10000.0}}, dict, "qwen", "reading.rope_theta=10000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", MISREAD)
def test_a_misreading_is_named(ward: Ward, tmp_path: Path, fault: str) -> None:
    training, edit, spelling, option = MISREAD[fault]
    where = write(tmp_path, edit(ward.trained(**training) if training else ward.usual), spelling)
    found = ward.examined(where)
    assert found.better is not None
    assert found.better.name == option
    assert found.better.agreement > 0.8
    with pytest.raises(UserError, match=f"Give {option} to read it so"):
        refuse_reading("mtp", where, found)


def test_a_head_that_is_read_rightly_is_left_alone(ward: Ward, tmp_path: Path) -> None:
    found = ward.examined(write(tmp_path, ward.usual))
    assert found.better is None
    assert found.ways[0].agreement > 0.8
    names = {way.name for way in found.ways}
    assert {f"reading.{name}=true" for name in ("hidden_first", "norm_offset")} < names
    assert {f"reading.{name}=false" for name in ("target_norm", "norm_output")} < names
    assert "written: elsewhere, in the dialect of qwen" in {f"{fact.name}: {fact.said}" for fact in found.facts}

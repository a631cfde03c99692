"""The drafters of a target: their models are loaded by their paths, and drafters made anew for each generation.

A kind is a kind of drafters (early_exit, eagle3, …), whose code is its plugin. A method names a kind and how it drafts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from transformers import PreTrainedConfig

from outrider.base.streams import Streams
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import position_limit
from outrider.inference.core.drafter import Drafter
from outrider.inference.settings.evaluate import Drafting
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig, known_size
from outrider.inference.shapes.shapes import find_shape
from outrider.inference.sizing.policy import Tuning

if TYPE_CHECKING:
    from outrider.inference.drafters.plugin import ModelOptions

Drafters = Mapping[str, object]  # the loaded model of each kind (see `inference.settings.kinds`) that has one


def load_drafters(config: Drafting, target: Any, **tensor_options: "Unpack[ModelOptions]") -> Drafters:
    """The models whose paths `config` gives, by kind, for this target. Raises `UserError`."""
    for method in config.methods.values():
        if KINDS[method.source].layers:  # it drafts with layers of the target
            KINDS[method.source].load_plugin().require_fits(method, target.config.num_hidden_layers)
    drafters: dict[str, object] = {}
    for kind, drafter_path in config.paths.items():
        drafters[kind] = config.plugin(KINDS[kind]).load(drafter_path, target, config.methods, **tensor_options)
    for structure in (method.structure for method in config.methods.values() if method.structure.kind == "static"):
        find_shape(structure.shape, known_size(structure.nodes))  # invalid shapes fail before the target is loaded
    return {kind: model for kind, model in drafters.items() if model is not None}


def context_length(target_config: PreTrainedConfig, drafters: Drafters) -> int:
    """The context length that the target and all its draft models support."""
    return min([context_limit(target_config), *position_limits(drafters)])


def position_limits(drafters: Drafters) -> list[int]:
    """The context limits, in positions, of the models that `drafters` run, if they have limits."""
    models = [model for kind, drafter in drafters.items() for model in KINDS[kind].load_plugin().causal_lms(drafter)]
    return [limit for model in models if (limit := position_limit(model.config)) is not None]


def new_drafter(
    method: MethodConfig, drafters: Drafters, streams: Streams, drawn: bool = False, tuning: Tuning | None = None
) -> Drafter:
    """A new drafter of `method` for one generation, with random `streams`. drawn: sample drafts from q, the drafter's
    probabilities. tuning: the measured costs of sizes that are "auto"."""
    if tuning is not None and drawn:  # sizes would depend on the other texts, and drawn tokens must only on the seed
        tuning = replace(tuning, shared=None)
    kind = KINDS[method.source]
    return kind.load_plugin().make(drafters.get(kind.name), method, streams, drawn=drawn, tuning=tuning)

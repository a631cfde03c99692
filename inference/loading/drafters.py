"""Preparing draft models for decoding, and making a new drafter for every generation."""

from collections.abc import Mapping

from draft_models.targets.target import Target
from inference.core.drafter import Drafter
from inference.settings.kinds import KINDS
from inference.settings.method import MethodConfig
from inference.sizing.policy import Tuning
from outrider.progress import Stage
from outrider.streams import Streams

Drafters = Mapping[str, object]  # the loaded model of each kind (see `inference.settings.kinds`) that has one


def new_drafter(
    method: MethodConfig,
    drafters: Drafters,
    streams: Streams,
    drawn: bool = False,
    tuning: Tuning | None = None,
) -> Drafter:
    """A new drafter of `method`, for the generation of `streams`.

    drawn: sample drafts from q. tuning: for sizes that are "auto" (see `inference.measure.probe`).
    """
    kind = KINDS[method.source]
    return kind.load_plugin().make(drafters.get(kind.name), method, streams, drawn=drawn, tuning=tuning)


def prepare(target: Target, drafters: Drafters) -> None:
    """Prepare a target and its drafters for decoding: fuse layers, pack weights for the device, share heads."""
    from inference.engines.packing import lay_out  # the engines: imported only for decoding

    with Stage("laying out weights, compiling what is new"):
        if target.layered is not None:  # else it runs unchanged
            lay_out(target.layered, target.device)
        for name, model in drafters.items():
            KINDS[name].load_plugin().prepare(model, target)

"""Drafters made ready to decode beside a target, and fresh ones for every generation."""

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
    """The drafter of `method`, fresh for the one generation that `streams` belong to.

    drawn: draw drafts from q (sampling). tuning: for sizes that are "auto" (see `inference.measure.probe`).
    """
    kind = KINDS[method.source]
    model, maker = drafters.get(kind.name), kind.load_maker()
    if kind.shaped and method.reads_ngrams:
        from draft_models.ngrams.table import TrigramTable  # compiled code: not for who drafts otherwise
        from inference.drafters.ngram.fused import Fused

        table = drafters.get("ngrams")
        assert isinstance(table, TrigramTable)
        return Fused(maker.draft_model(model, method), table, method, tuning)
    return maker.make(model, method, streams, drawn=drawn, tuning=tuning)


def prepare(target: Target, drafters: Drafters) -> None:
    """Make a target and its drafters ready to decode: layers fused, weights laid out for the device, heads shared."""
    from inference.engines.packing import lay_out  # the engines: loaded once something decodes

    with Stage("laying out weights, compiling what is new"):
        if target.layered is not None:  # else it runs as it is
            lay_out(target.layered, target.device)
        for name, model in drafters.items():
            KINDS[name].load_maker().prepare(model, target)

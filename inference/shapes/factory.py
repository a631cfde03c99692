"""Draft structures, built from their settings and stop rules. A structure shapes a round's draft: a chain or a tree."""

import random
from collections.abc import Mapping

from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import AcceptanceHead
from outrider.inference.settings.method import MethodConfig, StructureConfig, StructureKind
from outrider.inference.shapes.opt_tree import OptTree
from outrider.inference.shapes.shapes import Chain, KConfig, Static
from outrider.inference.shapes.structure import Structure, Tree
from outrider.inference.shapes.token_graph import Graph
from outrider.inference.sizing.policy import Tuning
from outrider.inference.stopping.rules import make_rule

TREES: Mapping[StructureKind, type[Static] | type[KConfig] | type[OptTree] | type[Graph]] = {
    "static": Static,
    "k_config": KConfig,
    "opt_tree": OptTree,
    "token_graph": Graph,
}


def make_structure(
    method: MethodConfig,
    streams: Streams,
    is_sampled: bool = False,
    head: AcceptanceHead | None = None,
    tuning: Tuning | None = None,
) -> Structure:
    """A new structure of `method`, for one generation.

    streams: of random numbers; the draft and the stop rule use one stream each. is_sampled: sample the draft from q,
    else take the most likely tokens. head: the calibration head, for rules that ask it. tuning: measured costs, for
    sizes that are "auto" and rules by costs.
    """
    settings = method.structure
    generator = streams.of("draft") if is_sampled else None
    if settings.kind == "chain":
        # drawn: `survival`, a rule of chains only, then expects min(1, p/q); naive verification accepts with p alone.
        is_drawn = is_sampled and method.verify != "naive"
        return Chain(make_rule(method.stop, streams, head, tuning, drawn=is_drawn), generator)
    tree = make_tree(settings, generator, tuning)
    tree.rule = make_rule(method.stop, streams, head, tuning, levels=tree.max_depth)
    return tree


def make_tree(settings: StructureConfig, generator: random.Random | None = None, tuning: Tuning | None = None) -> Tree:
    """A tree structure with `settings`, which drafts all its levels; tuning: for sizes that are "auto"."""
    return TREES[settings.kind](settings, generator, tuning)

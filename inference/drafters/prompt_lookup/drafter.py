"""Prompt lookup as a kind of drafters: `PromptLookup` by itself."""

from outrider.base.streams import Streams
from outrider.inference.core.drafter import Drafter
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.drafters.plugin import DrafterPlugin
from outrider.inference.settings.method import AUTO, MethodConfig
from outrider.inference.sizing.policy import Tuning


class PromptLookupPlugin(DrafterPlugin[None]):
    """There is no model."""

    def make(
        self, model: None, method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        cost_tuning = tuning if method.stop.max_draft == AUTO else None
        return PromptLookup(method.max_ngram, method.stop.longest(), cost_tuning)

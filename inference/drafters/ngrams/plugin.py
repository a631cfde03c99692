"""N-gram tables as a kind of drafters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from outrider.base.streams import Streams
from outrider.draft_models.ngrams.table import TrigramTable, map_table, table_digest
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.inference.core.drafter import Drafter
from outrider.inference.drafters.ngrams import KIND
from outrider.inference.drafters.ngrams.beside_model import NgramsBesideModel
from outrider.inference.drafters.ngrams.drafter import make_ngram_drafter, open_table
from outrider.inference.drafters.plugin import DrafterPlugin, ModelOptions, TrainingRecord
from outrider.inference.settings.method import MethodConfig
from outrider.inference.sizing.policy import Tuning


class NgramPlugin(DrafterPlugin[TrigramTable | None]):
    def identity(self, where: str | None) -> dict[str, object]:
        return {"table": None if where is None else table_digest(Path(where))[:16]}

    def training_record(self, where: str) -> TrainingRecord:
        corpus = TrainingRecord.of({"data": map_table(Path(where))[0].facts.get("corpus")}).data or {}
        return TrainingRecord(
            data={key: value for key, value in corpus.items() if key not in ("text", "digest")} or None
        )

    def load(
        self, where: str, target: OpenTarget, methods: Mapping[str, MethodConfig], **_: Unpack[ModelOptions]
    ) -> TrigramTable | None:
        if not any(method.uses(KIND) for method in methods.values()):
            return None
        return open_table(where, target.vocabulary_digest, target.vocabulary_size)

    def make(
        self, model: TrigramTable | None, method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        assert model is not None  # a method reads it
        return make_ngram_drafter(model, method.ngrams, streams.number("search", bits=64), tuning)

    def make_beside_model(self, model: TrigramTable | None, method: MethodConfig, tuning: Tuning | None) -> Drafter:
        assert model is not None  # the method reads it
        return NgramsBesideModel(model, method.ngrams, tuning)

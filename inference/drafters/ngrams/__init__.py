"""N-gram tables: the continuations that a corpus and the text so far know draft; no model runs."""

from outrider.draft_models.targets.settings import TABLE
from outrider.inference.settings.kind import Kind

KIND = Kind(
    "ngrams",
    f"{__name__}.drafter:NgramPlugin",
    option=TABLE,
    file="table.safetensors",
    preset="ngrams",
    needs="an n-gram table directory (outrider build-trigrams)",
    vllm_method="custom_class",
    shaped=False,
    keys=("ngrams",),  # no structure shapes its drafts; only this kind reads a method's `ngrams`
)

"""Prompt lookup: what followed an earlier occurrence of the text's last tokens is the draft; there is no model."""

from outrider.inference.settings.kind import Kind

KIND = Kind(
    "prompt_lookup",
    f"{__name__}.drafter:PromptLookupPlugin",
    vllm_method="ngram",
    shaped=False,
    keys=("max_ngram", "stop.max_draft"),  # no structure shapes its drafts; it reads these fields
)

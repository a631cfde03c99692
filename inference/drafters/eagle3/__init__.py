"""EAGLE-3 heads: a decoder layer on aux hidden states of the target drafts (arXiv 2503.01840)."""

from outrider.draft_models.targets.settings import HEAD_FOLDER
from outrider.inference.settings.kind import Kind

KIND = Kind(
    "eagle3",
    f"{__name__}.drafter:Eagle3Plugin",
    option="eagle3",
    file="config.json",
    preset="eagle3/survival",
    needs="a directory or Hub name of an EAGLE-3 head",
    calibration=HEAD_FOLDER,
    vllm_method="eagle3",
    layers=True,
    readings=True,  # it needs single layers of the target; its files can be read in several ways
)

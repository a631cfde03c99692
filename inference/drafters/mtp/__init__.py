"""MTP heads: the layer for multi-token prediction that models bring along drafts."""

from outrider.inference.settings.kind import Kind

KIND = Kind(
    "mtp",
    f"{__name__}.drafter:MtpPlugin",
    option="mtp",
    needs="target, if it has an MTP head, or a directory, GGUF file or Hub name with one",
    file="config.json",
    preset="mtp/survival",
    layers=True,
    in_target=True,
    readings=True,
)

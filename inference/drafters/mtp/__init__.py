"""MTP heads: the layer for multi-token prediction that models bring along drafts."""

from outrider.inference.settings.kind import Kind

KIND = Kind(
    "mtp",
    f"{__name__}.drafter:MtpPlugin",
    option="mtp",
    file="config.json",
    preset="mtp/survival",
    needs="target, if it has an MTP head, or a directory, GGUF file or Hub name with one",
    vllm_method="mtp",
    in_target=True,
    layers=True,
    readings=True,  # it needs single layers of the target; its files can be read in several ways
)

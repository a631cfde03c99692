"""Block drafters: DFlash and DSpark draft a block of tokens in one pass on hidden states of the target."""

from outrider.draft_models.targets.settings import HEAD_FOLDER
from outrider.inference.settings.kind import Kind

KIND = Kind(
    "dflash",
    f"{__name__}.drafter:DFlashPlugin",
    option="dflash",
    file="config.json",
    preset="dflash/survival",
    needs="a directory or Hub name of a DFlash or DSpark drafter",
    calibration=HEAD_FOLDER,
    vllm_method="dflash",
    layers=True,
    readings=True,  # it needs single layers of the target; its files can be read in several ways
)

"""The plugin of a draft head, which reads aux hidden states of the target (at boundaries of its layers).

A plugin does what commands do with models of a kind. A reading is a way to run a head's files, as its config declares,
or with changes of the user.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self, TypeVar, Unpack

from torch import nn
from transformers import PreTrainedConfig

from outrider.draft_models.calibration import drafter_digest
from outrider.draft_models.heads.files import StoredDrafter, stored_tokens
from outrider.draft_models.heads.layers import DraftHead
from outrider.draft_models.heads.sizes import AS_DECLARED
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.draft_models.targets.stack import require_layers
from outrider.draft_models.targets.target import Target
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.drafters.model_plugin import TrainedDrafterPlugin, without_calibration
from outrider.inference.drafters.plugin import ModelOptions
from outrider.inference.engines.packing import lay_out

Head = TypeVar("Head", bound=DraftHead)


class HeadPlugin(TrainedDrafterPlugin[Head]):
    """changes: overrides of the declared reading, such as draft_ids="index": the head's map d2t holds ids, not offsets.
    local_name: a tensor's name in a file → its name in this project."""

    local_name: ClassVar[Callable[[str], str]]

    def __init__(self, changes: ReadingChanges = AS_DECLARED):
        self.changes = changes

    @abstractmethod
    def open_head(self, where: str, target: PreTrainedConfig) -> StoredDrafter[Head]:
        """The head in `where`, for a target of this config."""

    def read_with(self, changes: ReadingChanges) -> Self:
        return type(self)(changes)

    def is_foreign(self, where: str, target: OpenTarget) -> bool:
        return not self.open_head(where, target.config).made_here

    def digest(self, where: str) -> str:
        return drafter_digest(open_tensors(where), self.changes.overrides)

    def load_drafter(self, where: str, target: OpenTarget, **options: Unpack[ModelOptions]) -> Head:
        return self.open_head(where, target.config).load(**options)

    def prepare(self, model: Head, target: Target) -> None:
        drafter = without_calibration(model)
        drafter.use_target(require_layers(target))  # its embedding and output head, where the files have none
        lay_out(drafter, target.device)  # fuses layers, and packs weights as the device's kernels read them

    def draft_vocabulary(self, where: str) -> Sequence[int] | None:
        return stored_tokens(where, type(self).local_name, by_index=self.changes.draft_ids == "index")

    def empty_model(self, where: str, target: PreTrainedConfig) -> nn.Module:
        return self.open_head(where, target).empty()

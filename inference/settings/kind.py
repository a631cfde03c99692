"""The description of a kind of drafters: what options need to know of a kind, before torch is imported."""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.inference.drafters.plugin import AnyPlugin


@dataclass(frozen=True)
class Kind:
    """A kind of drafters, such as EAGLE-3 heads: the `KIND` of a folder in inference/drafters, whose class owns all
    other facts. A structure is a chain or a shape of tree; a stop rule ends a draft.

    name: the `source` of its methods.
    plugin: "module:name" of that class, a `DrafterPlugin`.
    option: the option of evaluate-checkpoint that names its model's path; None: it has no model.
    needs: what must be at that path; "": it has no model.
    file: by this file the option `checkpoint` recognises its model's directory (see `kind_in`); None: not accepted.
    preset: the method that is used for such a model by default.
    shaped: whether a structure and a stop rule shape its drafts; of others, which see tokens only, a recording can
    replace the target.
    keys: further fields that only this kind reads: of a method, or of its stop rule, as in "stop.max_draft".
    calibration: the folder of a calibration head in its model's directory, "" for the directory itself; None: it has no
    hidden states that a head could read, or no directory. Other engines read every *.safetensors file in a model's
    directory, so a head for a model in their format needs a separate folder.
    vllm_method: the method of vLLM that drafts with it; None: only this runtime does.
    layers: it drafts with layers of the target, which must run layer by layer.
    in_target: its model may be part of the target; the path is then the word "target".
    readings: its files may be read in several ways, which options of `reading` choose, such as `reading.taps`.
    """

    name: str
    plugin: str
    option: str | None = None
    needs: str = ""
    file: str | None = None
    preset: str | None = None
    shaped: bool = True
    keys: tuple[str, ...] = ()
    calibration: str | None = None
    vllm_method: str | None = None
    layers: bool = False
    in_target: bool = False
    readings: bool = False

    @property
    def has_stop(self) -> bool:
        """Whether the length of its drafts is `stop.max_draft`, at most."""
        return self.shaped or "stop.max_draft" in self.keys

    def load_plugin(self) -> "AnyPlugin":
        return resolve_name(self.plugin)()

"""The files of a draft head, and its draft vocabulary. Missing and unexpected tensors are errors, since a head with
tensors filled in or dropped would draft badly without any error.

A head's reading (`HeadSizes`) says how its tensors are read; its config.json declares a reading. "Here" means in this
code base: a tensor may have another name here than in the file. A draft vocabulary is the part of the target's tokens
that a head has logits for. It is stored as d2t, from which the target's id of each draft id follows, and as t2d, which
says of each of the target's tokens whether the token is in it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from outrider.base.errors import UserError, reason
from outrider.base.files import package_version, read_mapping
from outrider.base.words import list_words
from outrider.draft_models.formats.folder_model import require_weights
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE
from outrider.draft_models.heads.layers import DraftHead
from outrider.draft_models.heads.sizes import HeadSizes, Shapes
from outrider.draft_models.targets.tensor_files import TensorFiles, find_file, open_tensors

D2T, T2D, DRAFT_TOKENS = "d2t", "t2d", "draft_tokens"
MADE_WITH = "made_with"  # key in config.json of heads trained here: this toolkit's version


@dataclass(frozen=True, kw_only=True)
class HeadFiles:
    """A head on disk, of which only headers were read.

    source: its directory or Hub name. where: the same, as the user typed it: "eagle3=PATH". config: its config.json.
    stored_names: this toolkit's name of each tensor → its name in the files. shapes: by the names here.
    """

    source: str
    where: str
    config: Mapping[str, object]
    files: TensorFiles
    stored_names: Mapping[str, str]
    shapes: Shapes

    def tensors(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """All tensors by their names here, in `dtype` unless they are integers. Raises `UserError`."""
        loaded = self.files.read(self.stored_names.values(), dtype, device=device)
        return {name: loaded[stored_name] for name, stored_name in self.stored_names.items()}

    @property
    def made_here(self) -> bool:
        """Whether this toolkit trained it, so that its declared reading is right."""
        return str(self.config.get(MADE_WITH, "")).startswith("outrider")


Head = TypeVar("Head", bound=DraftHead, covariant=True)


@dataclass(frozen=True, kw_only=True)
class StoredDrafter(HeadFiles, Generic[Head]):
    """A head on disk, checked but not loaded: its dialect (its trainer's layout), and its declared reading with the
    user's overrides. record: the name of the file that training writes beside the head. module: the head's class.
    """

    dialect: str
    reading: HeadSizes
    record: ClassVar[str]
    module: ClassVar[type[DraftHead]]

    def make(self, reading: HeadSizes, tensors: Mapping[str, Tensor]) -> Head:
        """The head of `reading`, which may differ from the declared reading, with `tensors` by their names here.

        Raises `UserError` if tensors do not fit (see `choose_weights`), and for invalid maps d2t and t2d.
        """
        weights = choose_weights(module_shapes(self.module, reading), tensors, self.where)
        if (draft_ids := draft_tokens(reading, tensors, self.where)) is not None:
            weights[DRAFT_TOKENS] = draft_ids
        return cast("Head", self.module(reading, all_tokens=draft_ids is None).with_weights(weights))

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Head:
        """The head. A missing embedding or head is set later, from the target (`DraftHead.use_target`)."""
        return self.make(self.reading, self.tensors(dtype, device))

    def empty(self) -> Head:
        """The head without weights, on the meta device."""
        return cast("Head", self.module(self.reading, all_tokens=True))


def module_shapes(module: type[DraftHead], reading: HeadSizes) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights of a `module` under this reading, by their names here."""
    try:
        weights = module(reading, all_tokens=True).state_dict()
    except TypeError as error:  # sizes beyond what a tensor can have
        raise UserError(f"a head of impossible sizes ({reason(error)}); correct its {CONFIG_FILE}") from None
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def open_files(option: str, source: str, head_kind: str, to_local_name: Callable[[str], str]) -> HeadFiles:
    """The head in `source`, a directory or Hub name, given as `option`. head_kind: as in "an EAGLE-3 head".

    to_local_name: the name here of a tensor in the file. Raises `UserError` if it cannot be read.
    """
    where = f"{option}={source}"
    config_path = find_file(source, CONFIG_FILE, revision=None)
    if config_path is None:
        raise UserError(f"{where}: no {CONFIG_FILE} there; give a directory or Hub name of {head_kind}")
    config = read_mapping(config_path, "description of a head", "fetch it again")
    files = open_tensors(source)
    stored_names = {to_local_name(name): name for name in files.file_of}
    if len(stored_names) < len(files.file_of):
        duplicates = sorted(set(files.file_of) - set(stored_names.values()))
        raise UserError(f"{where}: tensors stored twice, under two names: {list_words(duplicates)}; fetch it again")
    tensors = dict(files.open_stored(files.file_of))
    require_weights(where, tensors)  # without a config: transformers does not load the head
    shapes = {name: tuple(tensors[stored_name].shape) for name, stored_name in stored_names.items()}
    return HeadFiles(source=source, where=where, config=config, files=files, stored_names=stored_names, shapes=shapes)


def require_shapes(
    sizes: HeadSizes, weights: Shapes, stored: HeadFiles, to_stored_name: Callable[[str], str] = lambda name: name
) -> None:
    """Raise `UserError` naming tensors of `stored` that are missing, unexpected, or of another shape than in `weights`,
    which are those of the reading. to_stored_name: the name in the file of a tensor here."""
    expected, shapes, where = dict(weights), stored.shapes, stored.where
    if sizes.draft_vocabulary < sizes.vocabulary or D2T in shapes:
        expected[D2T] = (sizes.draft_vocabulary,)
    if T2D in shapes:
        expected[T2D] = (sizes.vocabulary,)
    for problem, bad_names in ("missing", expected.keys() - shapes), ("unknown", shapes.keys() - expected):
        if bad_names:
            listing = list_words([to_stored_name(name) for name in sorted(bad_names)])
            raise UserError(
                f"{where}: {problem} tensors: {listing}. Expected those that its {CONFIG_FILE} asks for, and no "
                "others; fetch the head again, or correct its description"
            )
    misfit_name = next((name for name in sorted(expected) if expected[name] != shapes[name]), None)
    if misfit_name is not None:
        raise UserError(
            f"{where}: tensor {to_stored_name(misfit_name)} has shape {list(shapes[misfit_name])}: expected "
            f"{list(expected[misfit_name])}, as its {CONFIG_FILE} describes the head; correct that, or fetch it again"
        )


def choose_weights(shapes: Shapes, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Those of `tensors` that a reading asks for, which has these `shapes`; missing norms become identities.

    Raises `UserError` if another tensor is missing or has another shape.
    """
    fc, weights = tensors["fc.weight"], dict[str, Tensor]()
    for name, shape in shapes.items():
        if name not in tensors and "norm" not in name:
            raise UserError(f"{where}: has no {name}, which the reading asks for; take back that change")
        weights[name] = tensors[name] if name in tensors else torch.ones(shape, dtype=fc.dtype, device=fc.device)
        if tuple(weights[name].shape) != shape:
            raise UserError(
                f"{where}: tensor {name} has shape {list(weights[name].shape)}, but the reading asks for "
                f"{list(shape)}; take back that change"
            )
    return weights


def draft_tokens(sizes: HeadSizes, tensors: Mapping[str, Tensor], where: str) -> Tensor | None:
    """Ids [V_d], ascending, of the draft vocabulary; None: all tokens.

    Of `tensors`, d2t [V_d]: see `HeadSizes.draft_ids`; t2d [V]: whether a token is in it. Raises `UserError` for an id
    outside the target's vocabulary, for repeated ids, and if the two maps disagree.
    """
    d2t, t2d = tensors.get(D2T), tensors.get(T2D)
    if d2t is not None and d2t.is_floating_point():
        raise UserError(f"{where}: {D2T} holds {d2t.dtype}: expected integers; fetch the head again")
    draft_indices = torch.arange(sizes.draft_vocabulary, device=None if d2t is None else d2t.device)
    d2t_values = torch.zeros_like(draft_indices) if d2t is None else d2t.long()
    target_ids = d2t_values if sizes.draft_ids == "index" else draft_indices + d2t_values
    other_kind = "offset" if sizes.draft_ids == "index" else "index"
    remedy = f"It holds {sizes.draft_ids}s: reading.draft_ids={other_kind} reads it otherwise. Or fetch the head again"
    is_outside = (target_ids < 0) | (target_ids >= sizes.vocabulary)
    previous_ids = torch.nn.functional.pad(target_ids[:-1], (1, 0), value=-1)
    is_invalid = is_outside | (target_ids <= previous_ids)
    if is_invalid.any():
        index = int((is_outside if is_outside.any() else is_invalid).nonzero()[0])
        raise UserError(
            f"{where}: {D2T}[{index}]={int(d2t_values[index])} makes draft token {index} the target's token "
            f"{int(target_ids[index])}; expected ascending ones, 0 to {sizes.vocabulary - 1}. {remedy}"
        )
    if len(target_ids) == sizes.vocabulary:
        return None  # t2d may then be anything: trainers ignore it
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), target_ids):
        raise UserError(
            f"{where}: {D2T} and {T2D} name other tokens ({len(target_ids)} and {int(t2d.count_nonzero())}); "
            f"expected the same. The trainer may have changed one map without the other. {remedy}"
        )
    return target_ids


def stored_tokens(source: str, to_local_name: Callable[[str], str], *, by_index: bool) -> list[int] | None:
    """The draft vocabulary of the head in `source`, from its d2t; None without a d2t, or if it has all tokens.

    by_index: d2t has ids, not offsets. Raises `UserError` if it cannot be read.
    """
    files = open_tensors(source)
    stored_names = {to_local_name(name): name for name in files.file_of}
    maps = {name: files.read([stored_names[name]])[stored_names[name]] for name in (D2T, T2D) if name in stored_names}
    if D2T not in maps or (T2D in maps and len(maps[T2D]) == len(maps[D2T])):
        return None
    d2t = maps[D2T].long()
    return (d2t if by_index else torch.arange(len(d2t)) + d2t).tolist()


def map_tensors(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t [V_d] with offsets and t2d [V] of the draft vocabulary `ids` [V_d], as they are written."""
    return {D2T: ids - torch.arange(len(ids)), T2D: torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)}


def written_facts(dtype: torch.dtype, *, made_here: bool) -> dict[str, object]:
    """What config.json says of a written head besides its reading. made_here: whether this toolkit trained it."""
    dtype_name = str(dtype).removeprefix("torch.")
    version_field = {MADE_WITH: f"outrider {package_version()}"} if made_here else {}
    return {"dtype": dtype_name, "torch_dtype": dtype_name, **version_field}

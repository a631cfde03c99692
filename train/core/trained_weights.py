"""The weights in a checkpoint: the trained parameters of a model, and nothing else."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from outrider.errors import UserError, reason
from outrider.files import write_atomically
from train.core import sharding

WEIGHTS_FILE = "model.safetensors"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; tied parameters appear once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_trained(model: nn.Module, folder: Path, write: bool) -> None:
    """Save the trained parameters to `folder`; call it on every process, with `write` on the one that writes."""
    weights = sharding.whole_parameters(trained_parameters(model).items())
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / WEIGHTS_FILE, save({name: value.contiguous() for name, value in weights.items()}))


def load_trained(model: nn.Module, folder: Path) -> None:
    """Load the parameters that `save_trained` wrote to `folder`; raises `UserError` if names or shapes differ."""
    try:
        saved, trained = load_file(folder / WEIGHTS_FILE), trained_parameters(model)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder / WEIGHTS_FILE}: not readable ({reason(error)}); remove {folder}: resume=true goes on before it"
        ) from None
    wrong = sorted(saved.keys() ^ trained.keys()) or sorted(
        name for name, p in trained.items() if p.shape != saved[name].shape
    )
    if wrong:
        raise UserError(f"{folder}: does not fit the model to train; they differ in {', '.join(wrong[:5])}")
    for name, parameter in trained.items():
        sharding.assign(parameter, saved[name])

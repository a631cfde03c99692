"""What a checkpoint holds of a model: the parameters that are trained, and nothing else."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.errors import UserError, reason
from train.core import sharding

WEIGHTS_FILE = "model.safetensors"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; a tied one once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_trained(model: nn.Module, folder: Path, write: bool) -> None:
    """Put the trained parameters into `folder`; call it on every process, `write` on the one that does so."""
    weights = sharding.whole_parameters(trained_parameters(model).items())
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS_FILE)


def load_trained(model: nn.Module, folder: Path) -> None:
    """Give `model` what `save_trained` has put into `folder`; raises `UserError` where names or shapes differ."""
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

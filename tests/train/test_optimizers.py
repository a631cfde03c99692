"""Muon beside AdamW: who gets which parameter, the same steps as apart, and their common state."""

import pytest
import torch

from outrider.errors import UserError
from tests.train.fit_job import TinyModel, tiny_config
from train.optimizers import MuonAdamW, build_optimizer, layer_matrices
from train.trained_weights import trained_parameters


def weights(model):
    return {name: p.detach().clone() for name, p in trained_parameters(model).items()}


def test_muon_takes_the_layers_matrices_and_nothing_else():
    model = TinyModel()
    assert {id(p) for p in layer_matrices(model)} == {id(model.layer.mix.weight), id(model.layer.out.weight)}
    with pytest.raises(UserError, match="optimizer=muon"):
        build_optimizer(model.head, tiny_config())


def _train_a_little(model, optimizer, seed, steps=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in trained_parameters(model).values():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()


def test_muon_adamw_is_muon_and_adamw():
    ours, theirs = TinyModel(), TinyModel()
    config = tiny_config()
    optimizer = build_optimizer(ours, config)
    assert isinstance(optimizer, MuonAdamW)
    matrices = layer_matrices(theirs)
    taken = {id(p) for p in matrices}
    rest = [p for p in trained_parameters(theirs).values() if id(p) not in taken]
    separate = [
        torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=0.1, adjust_lr_fn="original"),
        torch.optim.AdamW([p for p in rest if p.ndim > 1], lr=config.lr, betas=config.betas, weight_decay=0.1),
        torch.optim.AdamW([p for p in rest if p.ndim < 2], lr=config.lr, betas=config.betas, weight_decay=0.0),
    ]
    _train_a_little(ours, optimizer, seed=1)
    _train_a_little(theirs, type("All", (), {"step": lambda self: [part.step() for part in separate]})(), seed=1)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-12, atol=1e-14)


def test_muon_adamw_state_survives_a_file_bit_for_bit(tmp_path):
    first, second = TinyModel(torch.float32), TinyModel(torch.float32)
    optimizer = build_optimizer(first, tiny_config())
    _train_a_little(first, optimizer, seed=1)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    second.load_state_dict(first.state_dict())
    restored = build_optimizer(second, tiny_config())
    restored.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for model, either in ((first, optimizer), (second, restored)):
        for group in either.param_groups:
            group["lr"] *= 0.5  # a schedule must reach both parts after a restore
        _train_a_little(model, either, seed=2)
    for name, value in weights(first).items():
        assert torch.equal(value, weights(second)[name])

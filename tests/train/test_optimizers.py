"""Muon beside AdamW: who gets which parameter, the same steps as apart, and their common state."""

import pytest
import torch

from outrider.draft_models.targets.open_target import fast_dtype
from outrider.train.core.engine import Engine
from outrider.train.core.optimizers import Float32Muon, MuonAdamW, build_optimizer, layer_matrices
from outrider.train.core.sharding import trained_parameters
from tests.refusals import refusal
from tests.train.fit_job import TinyModel, tiny_config
from tests.train.fit_runs import trained_weights


def test_muon_takes_the_layers_matrices_and_nothing_else():
    model = TinyModel()
    assert {id(p) for p in layer_matrices(model)} == {id(model.layer.mix.weight), id(model.layer.out.weight)}
    refusal("optimizer=muon", build_optimizer, model.head, tiny_config())


def _train_a_little(model, optimizer, seed, steps=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in trained_parameters(model).values():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()


def test_muon_adamw_is_muon_and_adamw():
    """Torch's Muon where bfloat16 is quick, else the one in float32."""
    ours, theirs = TinyModel(), TinyModel()
    config = tiny_config()
    optimizer = build_optimizer(ours, config)
    assert isinstance(optimizer, MuonAdamW)
    matrices = layer_matrices(theirs)
    taken = {id(p) for p in matrices}
    rest = [p for p in trained_parameters(theirs).values() if id(p) not in taken]
    muon = torch.optim.Muon if fast_dtype(torch.device("cpu")) == torch.bfloat16 else Float32Muon
    separate = [
        muon(matrices, lr=config.muon_lr, weight_decay=0.1, adjust_lr_fn="original"),
        torch.optim.AdamW([p for p in rest if p.ndim > 1], lr=config.lr, betas=config.betas, weight_decay=0.1),
        torch.optim.AdamW([p for p in rest if p.ndim < 2], lr=config.lr, betas=config.betas, weight_decay=0.0),
    ]
    _train_a_little(ours, optimizer, seed=1)
    _train_a_little(theirs, type("All", (), {"step": lambda self: [part.step() for part in separate]})(), seed=1)
    torch.testing.assert_close(trained_weights(ours), trained_weights(theirs), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (6, 6)])
def test_muon_in_float32_is_the_polynomial_of_the_singular_values(shape):
    """And torch's, which takes the same steps, is off by what bfloat16 rounds."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    given = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "adjust_lr_fn": "original"}
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [Float32Muon([ours], **given), torch.optim.Muon([theirs], **given)]
    a, b, c = optimizers[0].defaults["ns_coefficients"]
    expected, momentum = start.double(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(shape, generator=generator)
        momentum = 0.9 * momentum + 0.1 * ours.grad.double()
        left, values, right = torch.linalg.svd(0.9 * momentum + 0.1 * ours.grad.double(), full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = a * values + b * values**3 + c * values**5
        scale = max(1, shape[0] / shape[1]) ** 0.5
        expected = 0.98 * expected - 0.1 * scale * left @ values.diag() @ right
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0.02)
    assert not torch.allclose(theirs.double(), expected, rtol=0, atol=1e-4)


def test_a_schedule_scales_every_rate_for_itself():
    config = tiny_config(lr=0.01, muon_lr=0.04)
    engine = Engine(TinyModel(), config)
    for scale in (0.5, 0.25):
        engine.set_rates(scale)
        rates = {id(p): group["lr"] for group in engine.optimizer.param_groups for p in group["params"]}
        matrices = {id(p) for p in layer_matrices(engine.model)}
        assert rates.keys() > matrices
        assert all(rate == scale * (0.04 if p in matrices else 0.01) for p, rate in rates.items())


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
    torch.testing.assert_close(trained_weights(second), trained_weights(first), rtol=0, atol=0)

"""The same promises on a CUDA device; skipped without one (`make test-gpu`)."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.base.streams import Streams
from outrider.base.wandb_config import WandbConfig
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.early_exit.checkpoint import from_pretrained
from outrider.draft_models.early_exit.model import EarlyExit, exit_layers
from outrider.draft_models.targets.attention import KERNELS, KernelChoice
from outrider.draft_models.targets.fingerprint import fingerprint_target
from outrider.draft_models.targets.model_files import layer_stack, load_layers
from outrider.draft_models.targets.open_target import load_config, load_tokenizer
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.drafter import Drafter
from outrider.inference.core.rounds import synchronized_clock
from outrider.inference.core.rows import RoundRows
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel
from outrider.inference.engines.graphs import cuda_graphs
from outrider.inference.engines.graphs.attention_kernels import SPLIT, attention_shape
from outrider.inference.engines.graphs.fixed_shapes import UPLOADS, Upload
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.loading.models import prepare_models
from outrider.inference.measure.arms import Turn, make_arms, measure_deviations, run_arms
from outrider.inference.measure.lossless import judge_deviations
from outrider.inference.settings.method import AUTOREGRESSIVE, MethodConfig, StopConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.factory import Chain, make_structure
from outrider.inference.stopping.interface import FixedLength
from outrider.train.eesd import train_early_exit
from outrider.train.settings.drafters import EesdConfig
from outrider.train.settings.fit import FitConfig
from tests.eagle3_runs import require_same_texts
from tests.known_targets import tokens_of
from tests.tiny import ARCHITECTURES, LAYERS, STRUCTURES, method_of, random_prompt, reference_generate, save_target

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def on_gpu(path: Path, exit_layer: int, dtype: torch.dtype) -> tuple[LayerStack, EarlyExit]:
    files, config = open_tensors(str(path)), load_config(str(path))
    stack = layer_stack(load_layers(files, config, range(LAYERS), dtype=dtype, device=CUDA))
    model = load_layers(files, config, exit_layers(config, exit_layer), dtype=dtype, device=CUDA)
    drafter = EarlyExit(model, exit_layer, own_head=True).requires_grad_(False)
    prepare_models(stack, {"early_exit": Calibrated(drafter)})
    return stack, drafter


def plain(stack: LayerStack, length: int, count: int, **options: Any) -> list[int]:
    return tokens_of(autoregressive(stack, random_prompt(length), max_new_tokens=count, **options))


def drafted(stack: LayerStack, drafter: Drafter, length: int, count: int, **options: Any) -> list[int]:
    return tokens_of(speculative(stack, drafter, random_prompt(length), max_new_tokens=count, **options))


def chain_of(drafter: EarlyExit) -> Drafter:
    return ModelDrafter(EarlyExitDraftModel(drafter), Chain(FixedLength(4)))


@pytest.mark.parametrize("exit_layer", [1, LAYERS - 1])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate(tmp_path: Path, architecture: str, kv_heads: int, exit_layer: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    path = save_target(tmp_path, architecture, kv_heads=kv_heads)
    model = AutoModelForCausalLM.from_pretrained(path).to(CUDA)
    stack, drafter = on_gpu(path, exit_layer, torch.float32)
    expected = reference_generate(model, random_prompt(20), 48)
    assert drafted(stack, chain_of(drafter), 20, 48) == plain(stack, 20, 48) == expected


@pytest.mark.parametrize("kernel", [*KERNELS, SPLIT, None])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_decode_to_the_same_tokens_and_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, structure: str, kernel: str | None
) -> None:
    """Texts cross the cache's buckets; with each attention kernel, and with the one that is measured to be best."""
    torch.backends.cuda.matmul.allow_tf32 = False
    path = save_target(tmp_path, architecture, kv_heads=2, peak=6.0)
    stack, drafter = on_gpu(path, LAYERS - 1, torch.float32)
    small = layer_stack(load_layers(open_tensors(str(path)), load_config(str(path)), range(LAYERS),
                                   dtype=torch.float32, device=CUDA))  # fmt: skip
    method = method_of(STRUCTURES[structure], 3)
    runtime = cuda_graphs.Graphed(16)
    chosen = [] if kernel is None else [KernelChoice(*attention_shape(stack), 1, 16, kernel)]
    runtime.prepare(70, chosen or runtime.choose_kernels([stack, small], 70))
    for source in (EarlyExitDraftModel(drafter), SmallLMDraftModel(small)):
        for turn, (length, count) in enumerate(((20, 48), (20, 48), (9, 30))):
            expected, before = plain(stack, length, count), runtime.captures
            drafter = ModelDrafter(source, make_structure(method, Streams(0)))
            assert drafted(stack, drafter, length, count, runtime=runtime) == expected
            assert plain(stack, length, count, runtime=runtime) == expected
            assert (runtime.captures == before) == (turn == 1)


@pytest.mark.parametrize("structure", ["chain", "opt_tree"])
def test_an_eagle3_heads_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, structure: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    require_same_texts(save_target(tmp_path, "mistral", kv_heads=2, peak=6.0), structure, CUDA)


def test_graphs_outlive_those_of_other_arenas(tmp_path: Path) -> None:
    """What they read (rotary tables, workspaces of libraries) stays when an arena beside them gives way to a larger."""
    torch.backends.cuda.matmul.allow_tf32 = False
    path = save_target(tmp_path, peak=6.0, hidden_size=512, intermediate_size=2048)
    stack, drafter = on_gpu(path, LAYERS - 1, torch.float32)
    method = MethodConfig(stop=StopConfig(rule="fixed", max_draft=3))
    runtime = cuda_graphs.Graphed()

    def draft(length: int, count: int) -> None:
        own = ModelDrafter(EarlyExitDraftModel(drafter), make_structure(method, Streams(0)))
        drafted(stack, own, length, count, runtime=runtime)

    draft(20, 8)
    expected = plain(stack, 5, 40, runtime=runtime)
    draft(100, 100)
    torch.cuda.empty_cache()
    before = runtime.captures
    assert plain(stack, 5, 40, runtime=runtime) == expected
    assert runtime.captures == before


def test_uploads_do_not_overtake_each_other() -> None:
    """The device is busy while the host sends more layouts than there are pinned buffers."""
    upload, rows = Upload(64, CUDA), RoundRows([-1])
    torch.cuda._sleep(200_000_000)
    arrived = []
    for base in range(3 * UPLOADS):
        upload.send(rows.layout(base, 0, 1), 1)
        arrived.append(upload.base.clone())
    assert torch.stack(arrived).tolist() == list(range(3 * UPLOADS))


@pytest.mark.parametrize("structure", ["chain", "k_config"])
def test_sampling_draws_on_the_device(tmp_path: Path, structure: str) -> None:
    path = save_target(tmp_path, kv_heads=2)
    stack, drafter = on_gpu(path, LAYERS - 1, torch.float32)
    method = {"m": method_of(STRUCTURES[structure], 3)}
    settings, texts = TextSettings(32, sampling=SamplingConfig(temperature=1.0, top_k=20)), []
    for runtime in (None, cuda_graphs.Graphed(), None):
        arms = make_arms(stack, {"early_exit": Calibrated(drafter)}, method, None, settings, runtime=runtime)
        texts.append({name: arm(random_prompt(16), Streams(0)).tokens for name, arm in arms.items()})
    assert texts[0] == texts[1] == texts[2]


def test_bf16_mismatches_are_ties_and_profiles_add_up(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(CUDA)
    stack, drafter = on_gpu(path, LAYERS - 1, torch.bfloat16)
    method = {"m": MethodConfig(stop=StopConfig(rule="fixed", max_draft=4))}
    make = partial(make_arms, stack, {"early_exit": Calibrated(drafter)}, method, None, TextSettings(64))
    arms, profilers = make(), make(clock=synchronized_clock)
    del profilers[AUTOREGRESSIVE]
    for seed in range(4):
        prompt = random_prompt(16, seed)
        (result,) = run_arms(arms, [Turn("p", "c", prompt)], repeats=1, turn=seed, profilers=profilers)
        judges = lambda choosing: make(choosing=choosing)  # noqa: E731
        (found,) = measure_deviations(model, [result], judges, [Streams(0, result.prompt_id)])
        assert {name: judge_deviations([deviation]).faults for name, deviation in found.items()} == {
            AUTOREGRESSIVE: (),
            "m": (),
        }
        rounds = result.profiles["m"].rounds
        assert all(r.draft_seconds + r.structure_seconds + r.verify_seconds <= r.seconds for r in rounds)


@pytest.mark.parametrize("objective", ["cross_entropy", "forward_kl"])
def test_eesd_trains_and_its_drafter_is_lossless(tmp_path: Path, objective: str) -> None:
    path = save_target(tmp_path / "target", kv_heads=2)
    text = tmp_path / "text.jsonl"
    lines = [
        json.dumps({"text": f"line {i}: " + "the quick brown fox jumps over the lazy dog " * 2}) for i in range(60)
    ]
    text.write_text("\n".join(lines))
    data = DataConfig(source="local", path=str(text), layout="text", heldout_fraction=0.2, cache_dir=str(tmp_path))
    fit = FitConfig(steps=20, batch_rows=8, lr=3e-3, eval_every=10, wandb=WandbConfig(mode="disabled"))
    config = EesdConfig(
        target=str(path), data=data, fit=fit, exit_layer=2, seq_len=64, objective=objective, eval_rows=4
    )
    train_early_exit(replace(config, decode_prompts=2, decode_tokens=16, out_dir=str(tmp_path / "e")))
    target = load_config(str(path))
    fingerprint = fingerprint_target(open_tensors(str(path)), target, load_tokenizer(str(path)))
    stack, _ = on_gpu(path, 2, torch.float32)
    drafter = from_pretrained(tmp_path / "e", target, fingerprint, dtype=torch.float32, device=CUDA)
    assert drafted(stack, chain_of(drafter), 20, 40) == plain(stack, 20, 40)

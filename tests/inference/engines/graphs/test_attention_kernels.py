"""The choice of attention kernels is measured once for a run, recorded, and asked for by shape ever after; what a token
of plain decoding costs the host once passes are graphs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft_models.targets.attention import KERNELS
from inference.core.decode import autoregressive
from inference.core.target_session import KernelChoice
from inference.engines.graphs import attention_kernels
from inference.engines.graphs.attention_kernels import WIDTHS, attention_shape, kernel_for, measure_kernels
from inference.engines.graphs.cuda_graphs import Graphed
from inference.engines.graphs.fixed_shapes import Upload
from tests.recorded import Recording, record_graphs
from tests.tiny import open_stack, random_prompt, save_target


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record_graphs(monkeypatch)


@pytest.mark.usefixtures("recorded")
def test_what_was_faster_is_chosen_for_every_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that likes one kernel for narrow passes and the other for wide ones."""
    wide = save_target(tmp_path / "wide", kv_heads=2)
    stacks = [open_stack(wide)[1], open_stack(wide)[1], open_stack(save_target(tmp_path / "small", "qwen3"))[1]]
    seconds = iter([1.0, 2.0, 1.0, 2.0, 2.0, 1.0, 2.0, 1.0] * 6)  # fused, products at each of the four widths
    monkeypatch.setattr(attention_kernels, "_seconds", lambda graph: next(seconds))
    found = measure_kernels(stacks, 600)
    assert {(c.heads, c.key_heads, c.head_dim) for c in found} == {attention_shape(stack) for stack in stacks}
    assert {choice.keys for choice in found} == {128, 512, 600}
    assert len(found) == 2 * 3 * len(WIDTHS)
    for choice in found:
        assert choice.kernel == ("fused" if choice.width < 16 else "products")


def test_what_was_not_measured_takes_the_nearest_choice(tmp_path: Path) -> None:
    """A function of the record alone: whoever asks, whenever, has the same answer."""
    stack = open_stack(save_target(tmp_path))[1]
    shape = attention_shape(stack)
    choices = [KernelChoice(*shape, 1, 128, "fused"), KernelChoice(*shape, 64, 2048, "products")]
    asked = {(width, keys): kernel_for(choices, stack, width, keys) for width in (1, 2, 32, 64) for keys in (128, 4096)}
    assert asked[1, 128] == asked[2, 128] == "fused"
    assert asked[64, 4096] == asked[32, 4096] == "products"
    assert asked == {key: kernel_for(choices, stack, *key) for key in reversed(asked)}
    other = [replace(choice, heads=99, kernel="products") for choice in choices]
    assert kernel_for(other, stack, 1, 128) == kernel_for([], stack, 1, 128) == KERNELS[0]


@pytest.mark.usefixtures("recorded")
@pytest.mark.slow
def test_a_longer_prompt_captures_nothing_where_the_longest_is_known(tmp_path: Path) -> None:
    """Only shapes that no text before has met become graphs; and the caches are as large as that text, not twice."""
    _, stack = open_stack(save_target(tmp_path, max_position_embeddings=512))
    runtime = Graphed()
    runtime.prepare(230, ())

    def captured(length: int, count: int) -> int:
        before = runtime.captures
        list(autoregressive(stack, random_prompt(length), max_new_tokens=count, runtime=runtime))
        return runtime.captures - before

    assert captured(20, 150) > 0
    assert [captured(100, 20), captured(140, 8), captured(20, 150)] == [0, 0, 0]
    captured(200, 30)
    assert captured(20, 150) == 0  # the longest text has not made the others' graphs anew
    (arena,) = runtime._arenas.values()
    assert 230 <= arena.capacity <= 230 + 64 * 3


@pytest.mark.usefixtures("recorded")
def test_a_token_of_plain_decoding_is_one_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding, layers, head and argmax are one graph, and where it stands it knows by itself."""
    _, stack = open_stack(save_target(tmp_path, peak=3.0))
    runtime, counts = Graphed(), {"replays": 0, "uploads": 0}
    runtime.prepare(128, ())
    prompt = random_prompt(20)
    expected = [token for r in autoregressive(stack, prompt, max_new_tokens=40) for token in r.tokens]

    def counted(kind: Any, method: str, name: str) -> None:
        run = getattr(kind, method)

        def count(*args: Any) -> Any:
            counts[name] += 1
            return run(*args)

        monkeypatch.setattr(kind, method, count)

    counted(Recording, "replay", "replays")
    counted(Upload, "send", "uploads")
    for _ in range(2):
        counts.update(replays=0, uploads=0)
        embedded: list[int] = []
        handle = stack.embed_tokens.register_forward_hook(lambda *_, seen=embedded: seen.append(1))
        rounds = autoregressive(stack, prompt, max_new_tokens=40, runtime=runtime)
        assert [token for r in rounds for token in r.tokens] == expected
        handle.remove()
    assert counts == {"replays": 39, "uploads": 1}
    assert len(embedded) == 1  # the prompt's: outside of a graph nothing is embedded token by token

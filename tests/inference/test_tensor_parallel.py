"""A target split over processes: the tokens of one process, each with its part of the weights; faults are caught."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from torch import nn

from draft_models.eagle3.model import Eagle3
from draft_models.early_exit.model import EarlyExit, exit_layers
from draft_models.targets import proof, tensor_parallel
from draft_models.targets.load_layers import load_layers
from draft_models.targets.open_target import open_target
from draft_models.targets.stack import LayerStack
from draft_models.targets.stored_tensors import Part
from draft_models.targets.tensor_parallel import prove_split, split_model, whole_head
from draft_models.tiny.models import tiny_head
from inference.core.decode import autoregressive, speculative
from inference.core.runtime import Eager
from inference.drafters.eagle3 import MAKER as EAGLE3_MAKER
from inference.drafters.eagle3 import Eagle3Source
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.ngram.lookup import PromptLookup
from inference.drafters.shaped import Shaped
from inference.engines.fused_layers import lay_out
from inference.engines.graphs.cuda_graphs import Graphed
from inference.engines.packing import can_pack
from inference.loading.subject import load_split
from inference.settings.evaluate import EvaluateConfig
from inference.settings.method import StructureConfig
from inference.settings.sampling import SamplingConfig
from inference.shapes.factory import make_structure
from outrider.errors import UserError
from outrider.groups import Group, join_group
from outrider.streams import Streams
from tests.families import FAMILIES, LAYERS, TYPICAL, save_family
from tests.inference.evaluate.evaluating import METHODS, QUESTIONS, facts, processes, together, tokens
from tests.launched import launched
from tests.tiers import quick_where, typical_where
from tests.tiny import method_of, random_prompt, reference_generate, save_target

CPU = torch.device("cpu")
TOKENS = 12
# Without a plan of splitting in transformers or here, or with heads that do not divide by two.
UNSPLIT = {
    "bitnet", "cohere", "diffllama", "gpt2", "gpt_bigcode", "gpt_oss", "jetmoe", "mimo_v2_flash", "persimmon",
    "stablelm",
}  # fmt: skip
SPLIT = sorted(FAMILIES.keys() - UNSPLIT)
FOUR = {"num_key_value_heads": 4, "moe_intermediate_size": 32}  # of those that have these, for four processes


def in_group(size: int, work: Callable[[Group], None], processes: int | None = None) -> None:
    """`work` by every process of a launcher, in groups of `size`; it must succeed in all of them."""
    count = size if processes is None else processes
    assert launched(count, lambda state: work(join_group(state, size))) == [0] * count


def texts(
    stack: LayerStack, drafter: EarlyExit, head: Eagle3, prompt: list[int], every: bool
) -> Iterator[tuple[str, list[int]]]:
    """What each way of decoding says; if not in `every` runtime, in one that another way does not use."""
    method = method_of(StructureConfig(kind="opt_tree", nodes=8, delta=0.0, max_depth=4))
    drafters: dict[str, Any] = {
        "tree": Shaped(EarlyExitSource(drafter), make_structure(method, Streams(0))),
        "taps": Shaped(Eagle3Source(head), make_structure(method, Streams(0))),
        "lookup": PromptLookup(),
    }
    for runtime, ways in ((Eager(), ("plain", "lookup")), (Graphed(), ("tree", "taps"))):
        options: Any = {"max_new_tokens": TOKENS, "runtime": runtime}
        for name in ("plain", *drafters) if every else ways:
            if name == "plain":
                rounds = autoregressive(stack, prompt, **options)
            else:
                rounds = speculative(stack, drafters[name], prompt, **options)
            yield f"{name} {runtime.name}", [t for r in rounds for t in r.tokens]


IN_EVERY_RUNTIME = ("llama", "mixtral", "phi3")
CASES = [(family, 2) for family in SPLIT] + [(family, 4) for family in ("llama", "gpt_neox", "mixtral", "phi3")]


@pytest.mark.parametrize(
    ("family", "size"),
    typical_where(
        lambda case: case[0] in TYPICAL and case[1] == (4 if case[0] == "phi3" else 2),
        quick_where(lambda case: case in (("llama", 2), ("qwen3_moe", 2)), CASES),
    ),
)
def test_its_tokens_are_those_of_one_process(tmp_path: Path, family: str, size: int) -> None:
    """Eager or in fixed shapes; plainly, by an early exit's tree on the split layers, by an EAGLE-3 head's that is not
    split, and by prompt lookup."""
    settings = json.loads((save_family(tmp_path / "plain", family) / "config.json").read_text())
    changes = {name: value for name, value in FOUR.items() if size == 4 and name in settings}
    target = open_target(str(save_family(tmp_path / "model", family, **changes)))
    prompt = random_prompt(9) * 2
    whole = target.stack(dtype=torch.float32)
    expected = [t for r in autoregressive(whole, prompt, max_new_tokens=TOKENS) for t in r.tokens]
    read_by_one, stored = target.files.bytes_read, target.config

    def work(group: Group) -> None:
        mine = open_target(target.source)
        stack = mine.stack(dtype=torch.float32, group=group)
        small = mine.files.bytes_read
        assert small < read_by_one  # how much smaller: see the test below
        drafter = EarlyExit.from_model(
            load_layers(mine.files, stored, exit_layers(stored, LAYERS - 1), dtype=torch.float32), LAYERS - 1,
            own_head=False,
        ).requires_grad_(False)  # fmt: skip
        drafter.use_head(stack.head)
        assert torch.equal(whole_head(stack.head)[0], whole.head.weight)
        head = tiny_head(stored)
        EAGLE3_MAKER.prepare(head, stack)
        assert torch.equal(head.shared_embedding[0], whole.embed_tokens.weight)
        for name, said in texts(stack, drafter, head, prompt, family in IN_EVERY_RUNTIME):
            assert said == expected, name

    in_group(size, work)


@pytest.mark.parametrize("family", typical_where(TYPICAL.__contains__, sorted(UNSPLIT)))
@pytest.mark.slow
def test_what_cannot_be_split_is_refused(tmp_path: Path, family: str) -> None:
    target = open_target(str(save_family(tmp_path, family)))

    def work(group: Group) -> None:
        with pytest.raises(UserError, match=r"tensor_parallel.*(split|does not divide)"):
            target.stack(dtype=torch.float32, group=group)

    in_group(2, work)


@pytest.mark.parametrize(
    "family",
    typical_where(
        lambda name: name in ("gemma2", "qwen3_moe"),
        quick_where(lambda name: name == "gemma2", ["gemma2", "llama", "olmo2", "qwen3_moe"]),
    ),
)
def test_in_16_bits_it_proves_itself_too(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 copies of all of it would be too large: on one layer of each kind, split as it is."""
    monkeypatch.setattr(proof, "LARGEST_COPY", 0)
    wider = {"moe_intermediate_size": 32} if "moe" in family else {}  # torch wants rows of whole 16 bytes
    target = open_target(str(save_family(tmp_path, family, **wider)))

    def work(group: Group) -> None:
        stack = target.stack(dtype=torch.bfloat16, group=group)
        said = [t for r in autoregressive(stack, random_prompt(9), max_new_tokens=TOKENS) for t in r.tokens]
        group.require_same(said, "tokens")

    in_group(2, work)


def test_a_process_reads_its_part_only(tmp_path: Path) -> None:
    """All matrices by halves or quarters, norms whole, by the bytes that were read; together they read the model."""
    target = open_target(str(save_target(tmp_path, kv_heads=4, vocab_size=258)))
    names = target.files.described()
    small = sum(size for name, (_, size) in names.items() if "norm" in name)
    large = sum(size for _, size in names.values()) - small
    for size in (2, 4):
        for rank in range(size):
            files = open_target(str(tmp_path)).files
            load_layers(files, target.config, range(LAYERS), dtype=torch.float32, group=Group(0, 1, rank, size))
            rows = 4 * 2 * 2 * target.config.hidden_size  # of embedding and head: 258 make no parts of one size
            assert abs(files.bytes_read - 4 * (small + large / size)) <= rows


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("length", "size", "pieces"), [(12, 3, 1), (12, 2, 2), (13, 4, 1), (5, 4, 1)])
def test_parts_make_up_the_whole(dim: int, length: int, size: int, pieces: int) -> None:
    whole = (
        torch.arange(1.0, 1 + 3 * length).view(length, 3)
        if dim == 0
        else torch.arange(1.0, 1 + 3 * length).view(3, length)
    )
    parts = [Part(dim, rank, size, pieces).of(whole) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    each = [part.chunk(pieces, dim) for part in parts]
    joined = torch.cat([torch.cat(piece, dim) for piece in zip(*each, strict=True)], dim)
    padded = [joined.select(dim, index) for index in range(joined.shape[dim])]
    kept = torch.stack([value for value in padded if bool((value != 0).any())], dim)
    assert torch.equal(kept, whole)


def a_bias_for_each(self: tensor_parallel.SplitInputs, x: torch.Tensor) -> torch.Tensor:
    return self.group.add(self.own(x) + (0.1 if self.bias is None else self.bias))


def another_order(self: Part, length: int, ours: Any = Part.ranges) -> list[tuple[int, int]]:
    return ours(self._replace(rank=self.size - 1 - self.rank) if self.dim else self, length)


def all_ids_here(self: tensor_parallel.SplitEmbedding, ids: torch.Tensor) -> torch.Tensor:
    return self.group.add(self.own(ids % len(self.own.weight)))


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "no sum": (Group, "add", lambda self, part: part),
    "a bias for each process": (tensor_parallel.SplitInputs, "forward", a_bias_for_each),
    "inputs in another order": (Part, "ranges", another_order),
    "rows of another part": (tensor_parallel.SplitEmbedding, "forward", all_ids_here),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """By the proof, before any weight is read."""
    target = open_target(str(save_target(tmp_path, "qwen2", kv_heads=2)))

    def work(group: Group) -> None:
        prove_split(target.config, group)
        monkeypatch.setattr(*FAULTS[fault])
        with pytest.raises(UserError, match="split, 'qwen2' gives logits that differ by"):
            target.stack(dtype=torch.float32, group=group)
        assert target.files.bytes_read == 0

    in_group(2, work)


def test_the_models_own_generate_works_on_a_split_one(tmp_path: Path) -> None:
    """It is the reference of the report; packed weights, where the runtime packs, say the same."""
    target = open_target(str(save_target(tmp_path, kv_heads=2)))
    prompt = random_prompt(12)
    expected = reference_generate(target.layers(dtype=torch.float32), prompt, TOKENS)

    def work(group: Group) -> None:
        plain = load_split(target, torch.float32, CPU, group)
        assert reference_generate(plain, prompt, TOKENS) == expected
        stack = target.stack(dtype=torch.float32, group=group)
        lay_out(stack, stack)
        assert [t for r in autoregressive(stack, prompt, max_new_tokens=TOKENS) for t in r.tokens] == expected
        assert any(isinstance(module, nn.Linear) for module in stack.modules()) != can_pack(CPU, torch.float32)

    in_group(2, work)


@pytest.mark.slow
def test_an_evaluation_by_two_groups_of_two(
    alone: EvaluateConfig, config: Callable[..., EvaluateConfig], on_the_cpu: None
) -> None:
    """Each group has its prompts; the leaders write; tuning and sizes are the leader's for its group."""
    made = config("out", tensor_parallel=2)
    assert together(made, 4) == [0] * 4
    assert tokens(made) == tokens(alone)
    assert facts(made) == facts(alone)
    assert processes(made) == 4
    report = json.loads((Path(made.out_dir) / "report.json").read_text())["reports"][0]
    assert report["tensor_parallel"] == 2
    said = (Path(made.out_dir) / "report.md").read_text()
    assert "4 processes at a time, each copy of the target split over 2" in said
    files = list(Path(made.out_dir).glob("results-*.jsonl"))
    assert len(files) == 2
    assert sum(len(file.read_text().splitlines()) for file in files) == len(QUESTIONS)  # each prompt by its leader


@pytest.mark.slow
def test_a_sampled_evaluation(config: Callable[..., EvaluateConfig], on_the_cpu: None) -> None:
    """Equal streams draw equal tokens: were there a difference, the processes would say so."""
    options = {"sampling": SamplingConfig(temperature=1.0), "methods": {"chain": METHODS["chain"]}}
    options |= {"compare_transformers": False}
    made, one = config("out", tensor_parallel=2, **options), config("one", **options)
    two = QUESTIONS[:2]
    assert together(made, 2, prompts=two) == [0, 0]
    assert together(one, 1, prompts=two) == [0]
    plain = {key: said for key, said in tokens(one).items() if key[1] == "autoregressive"}
    assert {key: said for key, said in tokens(made).items() if key in plain} == plain
    again = config("again", tensor_parallel=2, repeats=2, **options)
    assert together(again, 2, prompts=two) == [0, 0]  # one of two repeats is kept


def test_what_the_leader_says_holds_for_its_group() -> None:
    def work(group: Group) -> None:
        assert group.agreed({"group": group.index, "rank": group.rank}) == {"group": group.index, "rank": 0}

    in_group(2, work, processes=4)


def test_processes_that_disagree_are_stopped() -> None:
    def work(group: Group) -> None:
        group.require_same([1, 2], "the tokens they chose")
        with pytest.raises(UserError, match="differ in the tokens they chose"):
            group.require_same([group.rank], "the tokens they chose")

    in_group(2, work)


def test_a_launcher_with_another_number_of_processes_is_refused() -> None:
    def work(state: PartialState) -> None:
        with pytest.raises(
            UserError, match=r"tensor_parallel=2: the launcher started 3 processes, expected a multiple"
        ):
            join_group(state, 2)

    assert launched(3, work) == [0, 0, 0]


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = open_target(str(save_target(tmp_path, kv_heads=2))).config
    model = load_layers(open_target(str(tmp_path)).files, config, [0], dtype=torch.float32)
    with pytest.raises(UserError, match="tensor_parallel=4: the target has num_key_value_heads=2, which 4 does not"):
        split_model(model, Group(0, 1, 0, 4))

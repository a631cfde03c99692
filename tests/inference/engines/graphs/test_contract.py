"""Every pass that becomes a graph keeps the contract (`tests/inference/graph_contract.py`); planted faults break it."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.draft_vocabulary import narrow
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.early_exit.model import EarlyExit
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.narrowed import DraftVocabulary
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.batch import batch_state
from outrider.inference.batch.batch_decoder import Generator
from outrider.inference.batch.tasks import uniforms
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.drafters.dflash.drafter import OneBlock
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.drafters.skip_layers.drafter import SkipLayersDraftModel
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel
from outrider.inference.engines.graphs.cuda_graphs import Arena, Graphed
from outrider.inference.engines.graphs.fixed_shapes import WIDTHS, FixedView, GraphPool
from outrider.inference.loading.models import prepare_models
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.factory import make_structure
from tests.eagle3_runs import require_same_texts
from tests.faults import plant
from tests.fitted_heads import fitted_block, fitted_head, remade
from tests.inference import graph_contract as contract
from tests.tiers import typical_where
from tests.tiny import LAYERS, STRUCTURES, VOCABULARY, make_drafter, method_of, open_stack, random_prompt, save_target

TURNS = ((12, 8), (12, 8), (9, 5))  # tokens of the prompt, and new ones; they cross the cache's buckets
CHAIN = method_of(STRUCTURES["chain"], 3)
CALIBRATED = MethodConfig("early_exit", stop=StopConfig(rule="calibrated", max_draft=4))


@dataclass(frozen=True)
class Models:
    """A target and what drafts for it, with the layout they have on a GPU."""

    stack: LayerStack
    int8: LayerStack
    small: LayerStack
    some_tokens: LayerStack
    exit: EarlyExit
    head: Eagle3
    block: DFlash
    calibration: CalibrationHead


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    path = save_target(tmp_path_factory.mktemp("target"), "mistral", kv_heads=2, peak=6.0)
    with pytest.MonkeyPatch.context() as patch:
        contract.lay_out_as_on_a_gpu(patch)
        return laid_out(path)


def laid_out(path: Path) -> Models:
    target, plain = open_target(str(path)), open_stack(path)[1]
    some = target.layers(dtype=torch.float32)
    narrow(some, DraftVocabulary(torch.arange(0, VOCABULARY, 2), VOCABULARY))
    answers = [(random_prompt(length), text_of(plain, length, count)) for length, count in TURNS[1:]]
    head, block = fitted_head(plain, answers), fitted_block(plain, answers, rank=6)
    calibration = CalibrationHead(64, 64).requires_grad_(False)
    made = Models(plain, target.stack(dtype=torch.float32, int8=True), open_stack(path)[1], layer_stack(some),
                  make_drafter(path, LAYERS - 1, noise=0.3), head, block, calibration)  # fmt: skip
    drafters = {"early_exit": Calibrated(made.exit, calibration), "small_lm": made.small, "eagle3": head}
    prepare_models(made.stack, {**drafters, "dflash": block})
    made.some_tokens.requires_grad_(False)  # as it is read from its files
    prepare_models(made.int8, {"small_lm": made.some_tokens})
    return made


def text_of(stack: LayerStack, length: int, count: int, **options: Any) -> list[int]:
    rounds = autoregressive(stack, random_prompt(length), max_new_tokens=count, **options)
    return [token for r in rounds for token in r.tokens]


def drafted(models: Models, source: Any, method: MethodConfig, runtime: Runtime, target: str = "stack") -> None:
    """Every turn is the target's own text."""
    stack = getattr(models, target)
    for length, count in TURNS:
        drafter = ModelDrafter(source, make_structure(method, Streams(0), head=models.calibration))
        rounds = list(speculative(stack, drafter, random_prompt(length), max_new_tokens=count, runtime=runtime))
        assert [token for r in rounds for token in r.tokens] == text_of(stack, length, count)
        assert any(r.drafted for r in rounds)


def plainly(stack: LayerStack, runtime: Runtime) -> None:
    for length, count in TURNS:
        assert text_of(stack, length, count, runtime=runtime) == text_of(stack, length, count)


def sampled(models: Models, runtime: Runtime) -> None:
    for length, count in TURNS:
        texts = [
            text_of(models.stack, length, count, runtime=each,
                    selector=TokenSelector(Sampler(SamplingConfig(temperature=1.0)), random.Random(0)))
            for each in (runtime, None)
        ]  # fmt: skip
        assert texts[0] == texts[1]


@torch.inference_mode()
def rows(models: Models, runtime: Runtime, widths: tuple[int, ...] = WIDTHS) -> None:
    """Target passes of every width, of chains and of trees, with aux hidden states and top tokens."""
    for turn in range(3):
        session = runtime.session(models.stack, 0, 320, 256)
        session.aux_layers, session.top_count = (0, 2), 3
        session.prefill(random_prompt(5, seed=turn))
        session.commit(range(5))
        for width in widths:
            for count in {width, max(1, width - 1)}:
                parents = [-1, *(random.Random(turn).randrange(row) for row in range(1, count))]
                session.feed(torch.tensor(random_prompt(count, seed=turn)), parents)
                assert session.finish().isfinite().all()
                session.commit((0,))
        session.close()


PATHS: dict[str, Callable[[Models, Runtime], None]] = {
    "plain": lambda m, runtime: plainly(m.stack, runtime),
    "sampled": sampled,
    "rows": rows,
    **{
        f"early exit, {name}": lambda m, runtime, shape=shape: drafted(
            m, EarlyExitDraftModel(m.exit), method_of(shape, 3), runtime
        )
        for name, shape in STRUCTURES.items()
    },
    "early exit, calibrated": lambda m, runtime: drafted(m, EarlyExitDraftModel(m.exit), CALIBRATED, runtime),
    "small LM": lambda m, runtime: drafted(m, SmallLMDraftModel(m.small), CHAIN, runtime),
    "small LM, some tokens": lambda m, runtime: drafted(
        m, SmallLMDraftModel(m.some_tokens), method_of(STRUCTURES["opt_tree"]), runtime
    ),
    "EAGLE-3": lambda m, runtime: drafted(m, Eagle3DraftModel(m.head), CHAIN, runtime),
    "EAGLE-3, opt_tree": lambda m, runtime: drafted(
        m, Eagle3DraftModel(m.head), method_of(STRUCTURES["opt_tree"]), runtime
    ),
    "DSpark": lambda m, runtime: drafted(m, OneBlock(m.block), CHAIN, runtime),
    "fewer layers": lambda m, runtime: drafted(m, SkipLayersDraftModel(None), CHAIN, runtime),
    "int8": lambda m, runtime: plainly(m.int8, runtime),
    "int8, small LM": lambda m, runtime: drafted(m, SmallLMDraftModel(m.small), CHAIN, runtime, "int8"),
}


# One of each kind: they have every fault, and the others are thorough.
EACH_KIND = (
    "plain", "rows", "early exit, opt_tree", "small LM, some tokens", "EAGLE-3", "DSpark", "fewer layers", "int8"
)  # fmt: skip


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> contract.Watch:
    return contract.keep_contracts(monkeypatch)


@pytest.mark.parametrize(
    "path", typical_where(lambda path: path in (*EACH_KIND, "sampled", "early exit, calibrated"), PATHS)
)
def test_every_path_keeps_the_contract(models: Models, watch: contract.Watch, path: str) -> None:
    PATHS[path](models, Graphed(16))
    assert 2 <= len(watch.graphs) < len(watch.replayed)
    assert path != "rows" or {width for _, width, _ in watch.replayed} == {*WIDTHS}


def test_trials_of_attention_kernels_keep_it(models: Models, watch: contract.Watch) -> None:
    assert Graphed(16).choose_kernels([models.stack], 200)
    assert watch.graphs


@pytest.mark.usefixtures("watch")
def test_longer_texts_leave_the_older_graphs_as_they_were(models: Models) -> None:
    """Graphs read the rotary tables of their capture, and longer ones must begin alike."""
    stack, runtime = copy.deepcopy(models.stack), Graphed(16)
    plainly(stack, runtime)
    stack.reserve(4096)
    plainly(stack, runtime)
    stack.cos0 = stack.cos0 + 1
    with pytest.raises(contract.BrokenError, match="rotary tables"):
        plainly(stack, runtime)


@pytest.mark.parametrize("fault", [None, "_mask", "_positions", "_slot"])
def test_steps_of_answers_keep_it(
    tmp_path: Path, watch: contract.Watch, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """A step leaves its logits to its caller. fault: a buffer that is bound anew for every step."""
    if fault is not None:
        anew = f"self.{fault} = self.{fault}.clone()\n    for one in self._layers:\n        one.slot = self._slot\n"
        plant(monkeypatch, batch_state.FixedBatch, "feed", "if self._length ==", f"{anew}    if self._length ==")
    watch.allowed = 1
    monkeypatch.setattr(batch_state, "can_capture", lambda _: True)
    monkeypatch.setattr(batch_state, "_SPARE_SLOTS", 6)
    path = save_target(tmp_path, "llama", peak=0.5, kv_heads=2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    generator = Generator(model.requires_grad_(False), Sampler(SamplingConfig()), (), greedy_tokens=9)
    prompts, draws = [random_prompt(length) for length in (3, 11, 5)], [uniforms(0, str(i), 0, 9) for i in range(3)]
    with nullcontext() if fault is None else pytest.raises(contract.BrokenError, match=contract.REBOUND):
        found = generator.answer(prompts, draws)
        assert len(watch.graphs) > 1  # as the buffers grow
        monkeypatch.setattr(batch_state, "can_be_fixed", lambda *_: False)
        assert generator.answer(prompts, draws) == found
    assert watch.graphs


# --- planted faults --------------------------------------------------------------------------------------------------


PLANTED = {  # a rule, and what breaks it
    contract.WAITS: (FixedView, "masks", "base, depths = self", "int(self.upload.stop)\n    base, depths = self"),
    contract.STAYS: (FixedView, "masks", "return masks", "self.upload.kept = masks\n    return masks"),
    contract.WARM_UP: (
        FixedView, "masks", "return masks",
        "return vars(self.upload).setdefault(f'{self.width} {self.key_count}', masks)",
    ),
    contract.REBOUND: (
        Arena, "buffer", "if (name, output_index) not in",
        "if output_index < 0:\n        self.before = self.buffers.pop((name, output_index), None)  # another address\n"
        "    if (name, output_index) not in",
    ),
    contract.CHANGED: (  # a slot that the host chooses for every pass
        Arena, "view", "return FixedView(self.upload, row_count, key_count, self.limit,",
        "self.turn = vars(self).get('turn', 0) + 1\n"
        "    return FixedView(self.upload, row_count, key_count, self.limit - self.turn,",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", PLANTED)
@pytest.mark.usefixtures("watch")
def test_a_planted_fault_is_found_in_every_kind_of_pass(
    models: Models, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    plant(monkeypatch, *PLANTED[rule])
    for path in EACH_KIND:
        with pytest.raises(contract.BrokenError, match=rule):
            PATHS[path](models, Graphed(16))


@pytest.mark.usefixtures("watch")
def test_a_step_that_is_not_restored_after_the_warm_up_is_found(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Arena, "run", "capture(run, changed)", "capture(run)")
    with pytest.raises(contract.BrokenError, match=contract.UPDATED):
        plainly(models.stack, Graphed(16))


@pytest.mark.parametrize("structure", ["chain", "opt_tree"])
@pytest.mark.usefixtures("watch")
def test_the_two_faults_that_a_gpu_found_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, structure: str
) -> None:
    """Of EAGLE-3's graphs: a head that is not frozen, and one that was made in inference mode and then moved."""
    contract.lay_out_as_on_a_gpu(monkeypatch)
    path = save_target(tmp_path, "mistral", kv_heads=2, peak=6.0)
    run = partial(require_same_texts, path, structure, torch.device("cpu"))
    with pytest.raises(contract.BrokenError, match=contract.UNFROZEN):
        run(lambda head: head.requires_grad_())
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        run(lambda head: remade(head, in_inference_mode=True))


GIVEN, TAKEN = torch.arange(4.0), torch.zeros(4)
STATE: dict[str, Any] = {}


@pytest.mark.parametrize(("rule", "run"), [
    *(
        (contract.WAITS, run)
        for run in (
            lambda: GIVEN[0].item(),
            lambda: GIVEN.tolist(),
            lambda: GIVEN.nonzero(),
            lambda: TAKEN.zero_() if GIVEN[0] > 1 else None,
            lambda: GIVEN[GIVEN > 0],
            lambda: GIVEN.cpu(),
            lambda: GIVEN.to("cpu"),
            lambda: TAKEN.copy_(torch.zeros(4)),
            lambda: TAKEN.add_(torch.tensor(1)),
        )
    ),
    (contract.FREED, lambda: TAKEN.copy_(STATE["lent"])),
    (contract.CHANGED, lambda: TAKEN.copy_(STATE["number"] * GIVEN)),
    (contract.CHANGED, lambda: TAKEN[: STATE["size"]].fill_(1)),
    (contract.CHANGED, lambda: [TAKEN.fill_(1) for _ in range(STATE["more"])]),
    (contract.CHANGED, lambda: [TAKEN.fill_(1) for _ in range(STATE["less"])]),
])  # fmt: skip
@pytest.mark.usefixtures("watch")
def test_a_rule_refuses_what_breaks_it(rule: str, run: Callable[[], Any]) -> None:
    memory = np.ones(4, np.float32)

    def captured_and_replayed() -> None:
        STATE.update(lent=torch.from_numpy(memory), number=2, size=2, more=1, less=2)
        graph = GraphPool().capture(run)
        graph.replay()
        STATE.update(lent=torch.from_numpy(memory), number=3, size=3, more=2, less=1)
        graph.replay()

    with pytest.raises(contract.BrokenError, match=rule):
        captured_and_replayed()

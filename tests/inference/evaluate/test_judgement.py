"""The judgement of losslessness in half precision: it finds the faults planted into the runtime, and nothing else."""

import copy
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.base.streams import Streams
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.model_spec import LogitRule
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.rounds import Round
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.engines.packing import compare_panels
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.loading.models import load_reference, make_runtime, prepare_models
from outrider.inference.measure.arms import transformers_generate
from outrider.inference.measure.lossless import (
    GAP,
    PEAK,
    Forced,
    Judgement,
    Reference,
    double_precision,
    judge_deviations,
    make_reference,
    units_after_tips,
)
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.factory import make_structure
from tests.draft_models.formats.test_packed_weights import save_packed
from tests.families import LAYERS as OF_A_FAMILY
from tests.families import save_family
from tests.gguf_files import save_plain_target, write_gguf
from tests.inference.engines.cpu.test_by_codes import scaled, swapped, without_minimum
from tests.inference.evaluate.evaluating import QUESTIONS, evaluate
from tests.refusals import refusal
from tests.support.planted_faults import FAULTS, REACHED, planted, rope_scaled
from tests.tiers import quick_where, typical_where
from tests.tiny import (
    ARCHITECTURES,
    LAYERS,
    STRUCTURES,
    make_drafter,
    method_of,
    open_stack,
    random_prompt,
    save_exit,
    save_target,
    unproven,
)

TOKENS = 32
ARMS = ("autoregressive", "prompt_lookup", "tree")
SAMPLING = SamplingConfig(temperature=0.9)


def test_the_same_added_to_all_logits_is_no_error(tmp_path: Path) -> None:
    model, prompt, text = open_stack(save_target(tmp_path), torch.bfloat16)[0], random_prompt(9), random_prompt(5)
    model.model.layers[0].self_attn.k_proj.weight.data.zero_()  # of keys that are 0 nothing is rounded
    reference = make_reference(model, prompt, text)
    content = list(zip(reference.states[::2], reference.states[1::2], strict=True))
    forced = Forced(TokenSelector(), reference)
    forced.begin(SimpleNamespace(device=model.device, content=lambda: content), prompt)  # type: ignore[arg-type]
    for logits in reference.logits:
        forced.next_token(logits[None] + 3)
    assert forced.deviation(text).peak < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_another_order_are_no_fault_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    """Errors of three times the stock pass's are; they are a fault in half precision, and larger ones always."""
    model, prompt, text = open_stack(save_target(tmp_path), dtype)[0], random_prompt(9), random_prompt(5)
    reference = make_reference(model, prompt, text)

    def judge_states(times: float) -> Judgement:
        noise = (times * reference.states_noise)[:, None, None, :, None]
        states = [state + row for state, row in zip(reference.states, noise, strict=True)]
        content = list(zip(states[::2], states[1::2], strict=True))
        forced = Forced(TokenSelector(Sampler(SAMPLING), random.Random(0)), reference)
        forced.begin(SimpleNamespace(device=model.device, content=lambda: content), prompt)  # type: ignore[arg-type]
        for logits in reference.logits:
            forced.next_token(logits[None])
        return judge_deviations([forced.deviation(text)])

    assert (judge_states(3.0).faults == ()) == (dtype == torch.float32)
    assert judge_states(30.0).faults != ()


class Subject:
    """A target, a drafter, and references of a few prompts."""

    def __init__(
        self, path: Path, dtype: torch.dtype, runtime: str = "eager", prompts: int = 2, seed: int = 0,
        spoilt: Callable[[Any], object] = lambda layer: None,
    ):  # fmt: skip
        """spoilt: a change of each layer of the runtime before it is prepared."""
        self.model, self.stack = open_stack(path, dtype)
        for layer in self.stack.layers:
            spoilt(layer)
        self.drafter = make_drafter(path, LAYERS - 1, noise=0.15, dtype=dtype)
        prepare_models(self.stack, {"early_exit": Calibrated(self.drafter)})
        self.runtime = make_runtime(runtime, torch.device("cpu"))
        self.references = []
        for number in range(prompts):
            prompt = random_prompt(30 + 7 * number, seed=100 * seed + number)
            text = transformers_generate(self.model, prompt, TextSettings(TOKENS)).tokens
            self.references.append(make_reference(self.model, prompt, text))

    def decode(self, arm: str, prompt: tuple[int, ...], selector: TokenSelector) -> Iterator[Round]:
        options = {"max_new_tokens": TOKENS, "selector": selector, "runtime": self.runtime}
        if arm == "autoregressive":
            return autoregressive(self.stack, prompt, **options)
        if arm == "prompt_lookup":
            lookup = PromptLookup()
            return speculative(self.stack, lookup, prompt, **options)
        structure = make_structure(MethodConfig(structure=STRUCTURES["k_config"]), Streams(0), not selector.greedy)
        return speculative(self.stack, ModelDrafter(EarlyExitDraftModel(self.drafter), structure), prompt, **options)

    def judgement(self, arm: str, fault: str | None = None, seed: int = 0, sampled: bool = False) -> Judgement:
        def choose() -> TokenSelector:
            return TokenSelector(Sampler(SAMPLING), random.Random(seed)) if sampled else TokenSelector()

        found = []
        with planted(fault, seed, self.stack):
            for reference in self.references:
                own = [token for r in self.decode(arm, reference.prompt, choose()) for token in r.tokens]
                forced = Forced(choose(), reference)
                list(self.decode(arm, reference.prompt, forced))
                found.append(forced.deviation(own))
        return judge_deviations(found)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A target that is not sure of its next token, in bfloat16."""
    return Subject(save_target(tmp_path_factory.mktemp("t"), kv_heads=2), torch.bfloat16)


# Together they have a window, grouped heads, learned positions, and norms of queries and keys.
ROUNDS = {("llama", "eager"), ("mistral", "graphed"), ("opt", "eager"), ("qwen3", "graphed")}


@pytest.mark.parametrize(
    ("architecture", "runtime"),
    typical_where(ROUNDS.__contains__, list(itertools.product(ARCHITECTURES, ("eager", "graphed")))),
)
@pytest.mark.slow
def test_a_correct_runtime_only_rounds(tmp_path: Path, architecture: str, runtime: str) -> None:
    """Windows shorter than the text, grouped heads, fused and packed layers; both kinds of half precision."""
    dtype = torch.bfloat16 if runtime == "eager" else torch.float16
    subject = Subject(save_target(tmp_path, architecture, kv_heads=2), dtype, runtime)
    for arm in ARMS:
        found = subject.judgement(arm)
        assert found.faults == ()
        assert found.positions == 2 * TOKENS
        assert 0.5 < found.bulk < 1.1  # times transformers' own rounding, in the worst row: clearly below the limit
        assert found.peak < 4


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_planted_faults_are_found(subject: Subject, fault: str) -> None:
    """In every arm that the fault can reach, and in no other."""
    reached = {arm for arm in ARMS if subject.judgement(arm, fault).faults}
    assert reached == set(REACHED[FAULTS[fault].reaches])


SMALL = {  # a fault that passes in bfloat16, where it is below rounding
    "attention scale × 1.005": lambda layer: layer.self_attn.q_proj.weight.mul_(1.005),
    "a row of v × 1.01": lambda layer: layer.self_attn.v_proj.weight[7].mul_(1.01),
    "eps × 10": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 1e-5),
}


def test_faults_below_the_rounding_of_half_precision_show_in_float32(tmp_path: Path) -> None:
    """The check that a report of a judgement in half precision offers."""
    path = save_target(tmp_path, kv_heads=2)
    right = Subject(path, torch.float32)
    assert not any(right.judgement(arm, sampled=True).faults for arm in ARMS)
    for spoilt in SMALL.values():
        wrong = Subject(path, torch.float32, spoilt=spoilt)
        assert all(wrong.judgement(arm, sampled=True).faults for arm in ARMS)


@pytest.mark.slow
def test_faults_are_found_when_sampling_too(tmp_path: Path) -> None:
    """Then texts cannot be compared: a float32 runtime is judged by the target in float64."""
    subject = Subject(save_target(tmp_path), torch.float32)
    assert subject.judgement("tree", sampled=True).faults == ()
    for fault in ("RoPE frequencies × 1.002", "a committed position hidden from verification"):
        assert subject.judgement("tree", fault, sampled=True).faults != ()


def test_no_fault_where_readings_of_transformers_differ(subject: Subject) -> None:
    """One position with little rounding in its first reading and more in the readings in pieces."""
    reference = subject.references[0]
    row, position = 3, 17
    little = reference.states_noise.clone()
    little[row, position] /= 50
    lucky = replace(reference, states_noise=little)

    def judged(reference: Reference) -> Judgement:
        forced = Forced(TokenSelector(), reference)
        list(subject.decode("autoregressive", reference.prompt, forced))
        return judge_deviations([forced.deviation(reference.text)])

    assert judged(lucky).faults == ()
    once = judged(replace(lucky, tipping_noise=lambda: (little, reference.logits_noise)))
    assert (once.peak_at, len(once.faults)) == (f"values of layer 1 at position {position}", 1)


def test_a_tip_in_one_layer_is_one_in_all_of_that_position() -> None:
    once, largest = (torch.ones(4, 5), torch.ones(3)), (torch.full((4, 5), 2.0), torch.full((3,), 2.0))
    largest[0][1, 3] = 9.0  # of the logits, the second has this position
    states, logits = units_after_tips(once, largest)
    assert states[:, 3].tolist() == [2.0, 9.0, 2.0, 2.0]
    assert states.sum() == 16 + 15
    assert logits.tolist() == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("architecture", typical_where(lambda name: name in ("mistral", "opt"), ARCHITECTURES))
@pytest.mark.slow
def test_a_text_read_in_pieces_is_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """So it differs from the precise target by rounding only, also with windows shorter than the text."""
    monkeypatch.setattr("outrider.inference.measure.lossless.TIPS", 1.0)
    subject = Subject(save_target(tmp_path, architecture, kv_heads=2), torch.bfloat16, prompts=1)
    reference = subject.references[0]
    once = reference.states_noise, reference.logits_noise
    for widest, noise in zip(reference.tipping_noise(), once, strict=True):
        assert (widest >= noise).all()
        assert (widest > noise).any()
        assert (widest / noise).max() < PEAK


def test_what_is_not_a_number_is_a_fault(subject: Subject) -> None:
    """A comparison with NaN is false in either order."""
    forced = Forced(TokenSelector(), subject.references[0])
    list(subject.decode("prompt_lookup", subject.references[0].prompt, forced))
    forced._errors[5] = forced._errors[5] * math.nan
    found = judge_deviations([forced.deviation(subject.references[0].text)])
    assert found.faults != ()
    assert found.peak_at == f"logits at position {len(subject.references[0].prompt) - 1 + 5}"


def deviation_with(model: PreTrainedModel, stack: LayerStack, reference: Reference, own: tuple[int, ...]) -> Judgement:
    forced = Forced(TokenSelector(), reference)
    list(autoregressive(stack, reference.prompt, max_new_tokens=len(reference.text), selector=forced))
    return judge_deviations([forced.deviation(own)])


def test_only_real_ties_are_excused(tmp_path: Path) -> None:
    """A mismatch between two tokens of nearly equal logits is a tie; between any others it is an error."""
    path = save_target(tmp_path)
    model, _ = open_stack(path, torch.bfloat16)
    prompt = random_prompt(12)
    tokens = transformers_generate(model, prompt, TextSettings(8)).tokens
    twin = next(t for t in range(256) if t not in tokens)
    wrong = (*tokens[:3], twin, *tokens[4:])
    stack = open_stack(path, torch.bfloat16)[1]
    reference = make_reference(model, prompt, tokens)
    assert deviation_with(model, stack, reference, tokens).faults == ()
    assert deviation_with(model, stack, reference, wrong).largest_gap > GAP
    assert deviation_with(model, stack, reference, wrong).faults != ()
    assert deviation_with(model, stack, reference, tokens[:-1]).faults != ()  # shorter is not a tie
    with torch.no_grad():
        for head in (model.lm_head, stack.head):
            head.weight[twin] = head.weight[tokens[3]]
    tied = deviation_with(model, stack, make_reference(model, prompt, tokens), wrong)
    assert tied.faults == ()
    assert tied.largest_gap < 1


def test_too_many_ties_are_a_fault(subject: Subject) -> None:
    """Each is within the rounding noise, but transformers' own pass has almost none."""
    forced = Forced(TokenSelector(), subject.references[0])
    list(subject.decode("autoregressive", subject.references[0].prompt, forced))
    found = forced.deviation(subject.references[0].text)
    assert judge_deviations([replace(found, gaps=(1.0,) * 3, own_gaps=1)]).faults == ()
    assert judge_deviations([replace(found, gaps=(1.0,) * 30, own_gaps=1)]).faults != ()


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_precise_is_the_same_model_in_float32(tmp_path: Path, architecture: str) -> None:
    """For any shared tensors, without a second model; afterwards everything is unchanged."""
    path = save_target(tmp_path, architecture, tied=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    upcast = copy.deepcopy(model).float()
    ids = torch.tensor([random_prompt(20)])
    with torch.no_grad():
        before = model(ids).logits
        with double_precision(model):
            torch.testing.assert_close(model(ids).logits, upcast(ids).logits, rtol=0, atol=0)
        torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)
        with pytest.raises(IndexError), double_precision(model):
            model(torch.tensor([[10**6]]))
        torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)


def test_a_fault_of_the_runtime_cannot_widen_what_it_is_allowed(tmp_path: Path) -> None:
    """Only transformers makes the reference, also if runtime and reference share their weights."""
    path = save_target(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="outrider").eval()
    prompt, text = random_prompt(12), random_prompt(6, seed=1)
    clean = make_reference(model, prompt, text)
    stack = layer_stack(model)
    prepare_models(stack, {})
    for fault in FAULTS:
        with planted(fault, 0, stack):
            stack.reserve(64)
            shared = make_reference(model, prompt, text)
            tipping = shared.tipping_noise()
        torch.testing.assert_close(tipping, clean.tipping_noise(), rtol=0.5, atol=0)
        torch.testing.assert_close(shared.logits, clean.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(shared.logits_noise, clean.logits_noise, rtol=0.5, atol=0)


def without_rule() -> AbstractContextManager[Any]:
    """The head's logits as they are. It leaves every greedy choice as it was."""
    logits = LayerStack.logits

    def bare(stack: LayerStack, hidden: torch.Tensor) -> torch.Tensor:
        ruled, stack.spec = stack.spec, replace(stack.spec, logits=LogitRule())
        try:
            return logits(stack, hidden)
        finally:
            stack.spec = ruled

    return patch.object(LayerStack, "logits", bare)


def late_positions() -> AbstractContextManager[Any]:
    """Learned positions of the next place, for all tokens but the first."""
    embed = LayerStack.embed
    return patch.object(LayerStack, "embed", lambda stack, tokens, places: embed(stack, tokens, (places - 1).clamp(0)))


OF_FAMILIES = {
    "chain": method_of(STRUCTURES["chain"]),
    "tree": method_of(STRUCTURES["opt_tree"]),
    "lookup": MethodConfig(source="prompt_lookup"),
}
CHANGES = {"gemma2": {"final_logit_softcapping": 1.0}}  # or few logits come near it
FAMILY_FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "cohere": without_rule, "gemma2": without_rule, "gpt2": late_positions, "gpt_neox": lambda: rope_scaled(1.02),
    "granite": without_rule, "mixtral": lambda: rope_scaled(1.02), "phi": lambda: rope_scaled(1.02),
    "qwen2_moe": lambda: rope_scaled(1.02),
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    typical_where(
        lambda name: name in ("gemma2", "gpt2", "mixtral"), quick_where(lambda name: name == "gpt2", FAMILY_FAULTS)
    ),
)
def test_a_family_is_judged_in_half_precision(tmp_path: Path, family: str) -> None:
    """An early exit in chains and trees, and prompt lookup."""
    path = save_family(tmp_path / "target", family, **CHANGES.get(family, {}))
    save_exit(tmp_path / "drafter", path, OF_A_FAMILY - 1, noise=0.05)
    config = EvaluateConfig(
        checkpoint=str(tmp_path / "drafter"), methods=OF_FAMILIES, max_new_tokens=16, device="cpu", threads=1,
        dtype="bfloat16", out_dir=str(tmp_path / "right"), show_prompts=0,
    )  # fmt: skip
    evaluate(config, QUESTIONS[:1])
    reports = json.loads((tmp_path / "right/report.json").read_text())["reports"]
    assert [report["method"] for report in reports] == list(OF_FAMILIES)
    assert reports[0]["tau"] > 1.5
    for report in reports:
        judged = report["lossless"]["judged"]
        assert judged.keys() == {report["method"], "autoregressive"}
        for found in judged.values():
            assert found["faults"] == []
            assert 0.5 < found["bulk"] < 1.1
            assert found["peak"] < 4
    with unproven(), FAMILY_FAULTS[family](), pytest.raises(SystemExit):
        evaluate(replace(config, out_dir=str(tmp_path / "wrong")), QUESTIONS[:1])
    for report in json.loads((tmp_path / "wrong/report.json").read_text())["reports"]:
        assert all(found["faults"] for found in report["lossless"]["judged"].values())


@pytest.mark.parametrize(("stored", "fault"), [("Q8_0", scaled), ("Q4_0", swapped), ("int4", without_minimum)])
def test_a_fault_of_one_block_of_stored_codes_is_seen(
    tmp_path: Path, stored: str, fault: Callable[[torch.Tensor, str], None]
) -> None:
    """In one of a target's projections, before its reference is prepared, which has the same panels."""
    if stored == "int4":
        path, _ = save_packed(tmp_path, "awq", 4, group=32)
    else:
        path = write_gguf(save_plain_target(tmp_path / "plain"), tmp_path / "model.gguf", stored)
    stack = open_target(str(path)).stack(dtype=torch.bfloat16, coded=True)
    linear = stack.layers[1].mlp.down_proj
    prepare_models(stack, {})
    compare_panels(linear)
    fault(linear.parts[0].packed, linear.parts[0].kind_name)
    refusal("other weights than those that its file stores", compare_panels, linear)
    if stored != "int4":
        plain = load_reference(open_target(str(path)), torch.bfloat16, torch.device("cpu"))
        refusal("other weights than those that its file stores", prepare_models, stack, {}, plain)

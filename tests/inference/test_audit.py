"""The audit accepts what decodes losslessly and refuses what does not, and its statistics are exact."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from outrider.base.streams import Streams
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.audit.answers import ServedAnswer, read_answers
from outrider.inference.audit.audit import AnswerPart, Finding, audit, judge_arm, measure_excess, score_answers
from outrider.inference.audit.draws import LAMBDAS, ORDERS, Draws, combine_u, draws_of, p_values, refute, tokens_needed
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.sampling import Sampler, invert
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.measure.lossless import Reference, make_reference
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.settings.tools import AuditConfig
from outrider.inference.shapes.factory import make_structure
from tests.inference.table_target import TableModel
from tests.refusals import refusal
from tests.tiers import quick_where
from tests.tiny import STRUCTURES as SHAPES
from tests.tiny import make_drafter, method_of, open_stack, random_prompt, save_target

LEVEL = AuditConfig.level
Choose = Callable[[Tensor, int], Tensor]  # logits [rows, V] and the step → tokens [rows]
Lossy = Callable[[PreTrainedModel, int], list[ServedAnswer]]
TABLE = TableModel([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.5, 0.0], [0.1, 0.1, 0.1, 0.7], [0.0, 0.0, 1.0, 0.0]])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("audit") / "target", kv_heads=2, peak=3.0, num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def decode(
    model: PreTrainedModel, choose: Choose, seed: int = 0, rows: int = 16, count: int = 48, penalty: float = 1.0
) -> list[ServedAnswer]:
    """Answers of `model` to random prompts, with tokens by `choose`; of temperature 1, whatever that does."""
    prompts = [random_prompt(8, 100 * seed + row) for row in range(rows)]
    cache, fed, said = DynamicCache(), torch.tensor(prompts), []
    text = fed
    for step in range(count):
        logits = model(fed, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        said.append(choose(RepetitionPenaltyLogitsProcessor(penalty)(text, logits), step))
        fed = said[-1][:, None]
        text = torch.cat([text, fed], 1)
    answers = torch.stack(said, 1).tolist()
    return [ServedAnswer(prompt_ids=p, output_ids=a, temperature=1.0) for p, a in zip(prompts, answers, strict=True)]


def greedy(answers: Sequence[ServedAnswer]) -> list[ServedAnswer]:
    return [replace(answer, temperature=0.0) for answer in answers]


def judge(model: PreTrainedModel, answers: Sequence[ServedAnswer], seed: int = 0) -> Finding:
    by_line = dict(enumerate(answers, 1))
    return judge_arm(score_answers(model, by_line, Streams(seed)), by_line, LEVEL)


def faults(model: PreTrainedModel, answers: Sequence[ServedAnswer], seed: int = 0) -> tuple[str, ...]:
    return judge(model, answers, seed).faults


def draw(logits: Tensor, step: int, coins: torch.Generator, temperature: float = 1.0) -> Tensor:
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=coins)[:, 0]


def likeliest(logits: Tensor, step: int) -> Tensor:
    return logits.argmax(-1)


def every_token(coin: float) -> tuple[Tensor, Draws]:
    """Every token after every token of the table that can follow it: its probability, and it as a draw."""
    last, token = (TABLE.distributions > 0).nonzero(as_tuple=True)
    log_p = TABLE.distributions.log()[last]

    def rand(*shape: Any, **_: object) -> Tensor:
        return torch.full(shape[0] if len(shape) == 1 else shape, coin, dtype=torch.float64)

    with patch("torch.rand", rand):
        return TABLE.distributions[last, token], draws_of(log_p, log_p, token, torch.Generator())[0]


def test_under_the_targets_distribution_every_step_is_what_the_tests_take_it_for() -> None:
    """By enumeration: u is uniform, the martingale's steps have the mean 0, this variance and these cumulants."""
    last = (TABLE.distributions > 0).nonzero()[:, 0]
    weights, low = every_token(0.0)
    _, high = every_token(1.0)
    for state, order in product(range(len(TABLE.distributions)), range(ORDERS)):
        rows = last == state
        begins, ends, p = low.u[rows, order], high.u[rows, order], weights[rows]
        turn = begins.argsort()
        assert torch.allclose(begins[turn], torch.cat([begins.new_zeros(1), ends[turn][:-1]]))  # they tile [0, 1],
        assert float(ends.max()) == pytest.approx(1)
        assert torch.allclose(p, ends - begins)  # each of density 1
        assert torch.equal(turn, (-p).argsort(stable=True) if order == 0 else torch.arange(len(p)))
        mine, p = Draws(*(column[rows] for column in low)), weights[rows]
        assert float((p * mine.score).sum()) == pytest.approx(0, abs=1e-12)
        assert float((p * mine.score.square()).sum()) == pytest.approx(float(mine.variance[0]))
        assert torch.allclose((p[:, None] * (LAMBDAS * mine.score[:, None]).exp()).sum(0), mine.cumulants[0].exp())
        assert float(mine.shift.abs().max()) < 1e-12
        for bound in mine.tail.tolist():  # a token so unlikely is no likelier than it says
            assert float(p[mine.tail <= bound].sum()) <= bound + 1e-12


def test_several_tests_refuse_together_as_often_as_one_would() -> None:
    assert refute({"a": 0.0002, "b": 0.00033, "c": 0.0006, "d": 1.0}, 0.001) == ["a", "b"]
    assert refute({"a": 0.0003, "b": 0.0002601, "c": 0.9, "d": 1.0}, 0.001) == []
    assert refute({}, 0.001) == []


def test_the_beginnings_are_combined_as_fisher_does() -> None:
    u = torch.tensor([0.3, 0.99], dtype=torch.float64)
    both = float((1 - u).prod())
    assert combine_u(u[:1]) == pytest.approx(0.7)
    assert combine_u(u) == pytest.approx(both * (1 - math.log(both)))  # of a product of two uniform numbers
    assert combine_u(u[:0]) == 1.0
    assert 0 < combine_u(torch.ones(2, dtype=torch.float64)) < 1e-25


def drawn_from(log_p: Tensor, coins: torch.Generator) -> tuple[Draws, dict[str, Draws]]:
    return draws_of(log_p, log_p, torch.multinomial(log_p.exp(), 1, generator=coins)[:, 0], coins)


def test_draws_of_the_target_are_refused_as_seldom_as_the_level_says() -> None:
    """At a level of 0.2, so that it shows: 200 audits of 150 tokens each."""
    coins = torch.Generator().manual_seed(0)
    log_p = TABLE.distributions.log()[torch.randint(len(TABLE.distributions), (150,), generator=coins)]
    assert sum(bool(refute(p_values(drawn_from(log_p, coins)[0]), 0.2)) for _ in range(200)) <= 40


def test_what_servers_with_a_fault_draw_from_is_what_a_simulation_of_them_draws() -> None:
    """Typical acceptance and a forgotten residual, by enumeration of drafts and rejections."""
    coins = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.9, 0.08, 0.02, 0.0]], dtype=torch.float64)
    _, simulated = draws_of(p.log(), p.log(), torch.zeros(2, dtype=torch.long), coins)
    _, _, typical, forgotten = simulated
    for row, of_row in enumerate(p.tolist()):
        bound = min(0.09, 0.3 * math.exp(sum(x * math.log(x) for x in of_row if x)))
        rejected = sum(x for x in of_row if x <= bound)
        distributions = {typical: [x * (x > bound) + rejected * x for x in of_row]}
        distributions[forgotten] = [of_row[0] * (i == 0) + (1 - of_row[0]) * x for i, x in enumerate(of_row)]
        for fault, distribution in distributions.items():
            with patch("outrider.inference.audit.draws.COPY_COUNT", 20000):
                _, many = draws_of(p.log(), p.log(), torch.zeros(2, dtype=torch.long), coins)
            tails = many[fault].tail[row]
            found = [float((tails - sum(of_row[i:])).abs().lt(1e-9).double().mean()) for i in range(len(of_row))]
            assert found == pytest.approx(distribution, abs=0.015)


def test_the_simulation_needs_more_tokens_for_what_is_less_wrong() -> None:
    coins = torch.Generator().manual_seed(0)
    log_p = torch.randn(500, 40, dtype=torch.float64, generator=coins).mul(2).log_softmax(-1)
    real = [drawn_from(log_p, coins) for _ in range(16)]
    needed = {name: tokens_needed(draws, LEVEL, coins) for name, draws in real[0][1].items()}
    tilted, colder, typical, forgotten = (count or 4096 for count in needed.values())
    assert max(typical, forgotten) <= 512
    assert max(typical, forgotten) < min(tilted, colder)
    columns = [torch.stack([getattr(draws, name) for draws, _ in real], 1) for name in ("u", "tail", "score")]
    assert tokens_needed(Draws(*columns, *real[0][0][3:]), LEVEL, coins) is None  # no fault, so nothing is seen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafted", quick_where(bool, [True, False]))
def test_what_this_runtime_decodes_is_accepted(
    path: Path, model: PreTrainedModel, temperature: float, drafted: bool
) -> None:
    """Ten seeds each, plain and by drafts of which some are rejected."""
    _, stack = open_stack(path)
    exit_layer = make_drafter(path, 1, noise=0.15)  # the target's own second layer follows its first
    rejected = accepted = 0
    for seed in range(10):
        prompt, sampler = random_prompt(12, seed), Sampler(SamplingConfig(temperature=temperature))
        common = {
            "max_new_tokens": 30,
            "eos": frozenset[int](),
            "selector": TokenSelector(sampler, random.Random(seed)),
        }
        structure = make_structure(method_of(SHAPES["chain"], tokens=2), Streams(seed))
        rounds = list(
            speculative(stack, ModelDrafter(EarlyExitDraftModel(exit_layer), structure), prompt, **common)
            if drafted
            else autoregressive(stack, prompt, **common)
        )
        rejected += sum(one.drafted - one.accepted for one in rounds)
        accepted += sum(one.accepted for one in rounds)
        said = [token for one in rounds for token in one.tokens]
        assert faults(model, [ServedAnswer(prompt_ids=prompt, output_ids=said, temperature=temperature)], seed) == ()
    assert (rejected > 0 and accepted > 0) == drafted


def of_another_target(model: PreTrainedModel) -> PreTrainedModel:
    """The target with weights that are off by half a percent."""
    other = AutoModelForCausalLM.from_config(model.config).eval()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.005 * torch.randn(parameter.shape, generator=generator))
    return other


def colder(model: PreTrainedModel, seed: int) -> list[ServedAnswer]:
    coins = torch.Generator().manual_seed(seed)
    return decode(model, partial(draw, coins=coins, temperature=0.8), seed)


def threshold(model: PreTrainedModel, seed: int) -> list[ServedAnswer]:
    """Drafts of a drafter that is too sure are accepted where p > 0.3, else a token is drawn from p."""
    coins = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor, step: int) -> Tensor:
        p, drafted = logits.softmax(-1), draw(logits, step, coins, temperature=0.5)
        accepted = p.gather(-1, drafted[:, None])[:, 0] > 0.3
        return torch.where(accepted, drafted, draw(logits, step, coins))

    return decode(model, choose, seed)


def replaced(model: PreTrainedModel, seed: int) -> list[ServedAnswer]:
    """Of 200 greedy tokens one is the second-likeliest."""

    def choose(logits: Tensor, step: int) -> Tensor:
        tokens = logits.topk(2).indices[:, 0]
        if step == 20:
            tokens[::4] = logits[::4].topk(2).indices[:, 1]
        return tokens

    return greedy(decode(model, choose, seed))


def of_another(model: PreTrainedModel, seed: int) -> list[ServedAnswer]:
    return greedy(decode(of_another_target(model), likeliest, seed, rows=4))


def top_k_not_applied(model: PreTrainedModel, seed: int) -> list[ServedAnswer]:
    drawn = decode(model, partial(draw, coins=torch.Generator().manual_seed(seed)), seed)
    return [replace(answer, top_k=20) for answer in drawn]


def one_token_corrupted(model: PreTrainedModel, seed: int) -> list[ServedAnswer]:
    """A single drawn token of all is the least likely one."""
    coins = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor, step: int) -> Tensor:
        tokens = draw(logits, step, coins, temperature=0.3)
        if step == 20:
            tokens[0] = logits[0].argmin()
        return tokens

    return [replace(answer, temperature=0.3) for answer in decode(model, choose, seed)]


PENALTY = 1.3


def penalised(
    model: PreTrainedModel, seed: int, temperature: float = 1.0, penalty: float = PENALTY
) -> list[ServedAnswer]:
    """Decoded with this penalty and said to be with `PENALTY`, among the 20 likeliest tokens."""
    said = SamplingConfig(temperature=temperature, top_k=20, repetition_penalty=PENALTY)
    sampler, coins = Sampler(replace(said, repetition_penalty=1.0)), torch.Generator().manual_seed(seed)

    def choose(scores: Tensor, step: int) -> Tensor:
        return torch.multinomial(sampler.probabilities(scores), 1, generator=coins)[:, 0]

    return [replace(one, **asdict(said)) for one in decode(model, choose, seed, penalty=penalty)]


def penalty_ignored_greedily(model: PreTrainedModel, seed: int) -> list[ServedAnswer]:
    return penalised(model, seed, temperature=0.0, penalty=1.0)


def coins_used_twice(model: PreTrainedModel, seed: int) -> list[ServedAnswer]:
    """Every second token is drawn with the coin of the one before it."""
    coins = torch.Generator().manual_seed(seed)
    tossed: list[Tensor] = []

    def choose(logits: Tensor, step: int) -> Tensor:
        if step % 2 == 0:
            tossed.append(torch.rand(len(logits), 1, dtype=torch.float64, generator=coins))
        return invert(logits.softmax(-1), tossed[-1])[:, 0]

    return decode(model, choose, seed)


def of_another_prompt(model: PreTrainedModel, seed: int) -> list[ServedAnswer]:
    """The first token of an answer is among those that p hardly has; all later ones are drawn from p."""
    coins = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor, step: int) -> Tensor:
        unlikely = logits.where(logits.softmax(-1) < 0.001, -torch.inf)
        return draw(logits if step else unlikely, step, coins)

    return decode(model, choose, seed)


LOSSY = (
    replaced, colder, threshold, of_another, top_k_not_applied, one_token_corrupted, penalty_ignored_greedily,
    coins_used_twice, of_another_prompt,
)  # fmt: skip


@pytest.mark.parametrize("lossy", quick_where(lambda one: one in (replaced, colder), LOSSY))
def test_what_is_lossy_is_refused(
    model: PreTrainedModel, lossy: Callable[[PreTrainedModel, int], list[ServedAnswer]]
) -> None:
    for seed in range(2):
        assert faults(model, lossy(model, seed), seed), seed


def test_another_prompt_is_seen_by_the_first_tokens_alone(model: PreTrainedModel) -> None:
    (fault,) = faults(model, of_another_prompt(model, 0))
    assert "`beginning`" in fault


def test_faults_are_found_where_they_are(model: PreTrainedModel) -> None:
    for lossy, lines in ((replaced, set(range(1, 17, 4))), (one_token_corrupted, {1})):
        answers = lossy(model, 0)
        at = judge(model, answers).at
        assert {(token.line, token.position) for token in at} == {(line, 20) for line in lines}
        if lossy is replaced:
            for token in at:
                assert token.likeliest != token.token == answers[token.line - 1].output_ids[20]


def test_tokens_that_were_drawn_among_the_likeliest_are_accepted_where_it_is_said(model: PreTrainedModel) -> None:
    coins = torch.Generator().manual_seed(0)
    said = {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.0}
    sampler = Sampler(SamplingConfig(**said))
    drawn = decode(model, lambda logits, _: torch.multinomial(sampler.probabilities(logits), 1, generator=coins)[:, 0])
    told = [replace(answer, **said) for answer in drawn]
    assert faults(model, told) == ()
    assert faults(model, drawn)  # said to be of temperature 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_was_decoded_with_a_penalty_is_accepted(model: PreTrainedModel, temperature: float) -> None:
    for seed in range(5):
        assert faults(model, penalised(model, seed, temperature), seed) == ()


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02}]
)
def test_scores_are_those_of_generate(model: PreTrainedModel, sampling: dict[str, Any]) -> None:
    """Before every token of an answer, prompt and answer so far penalised, also where it is read in parts."""
    torch.manual_seed(0)
    prompt = random_prompt(12, 0)
    out = model.generate(
        torch.tensor([prompt]), do_sample=sampling["temperature"] > 0, repetition_penalty=PENALTY, max_new_tokens=24,
        output_scores=True, return_dict_in_generate=True, **(sampling if sampling["temperature"] else {}),
    )  # fmt: skip
    said = out.sequences[0, len(prompt) :].tolist()
    answer = ServedAnswer(prompt_ids=prompt, output_ids=said, repetition_penalty=PENALTY, **sampling)
    for start, end in ((0, 24), (0, 10), (10, 24)):
        reference = make_reference(model, [*prompt, *said[:start]], said[start:end])
        scores = AnswerPart(1, start, answer, reference).scores(reference.logits)
        assert torch.allclose(scores, torch.cat(out.scores[start:end]), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "cut", [{"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.1}]
)
def test_no_smaller_shift_of_logits_undoes_what_is_beyond_a_cut(cut: dict[str, Any]) -> None:
    """And twice as large a one does: the token up, those down that it would not get ahead of."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 30, dtype=torch.float64, generator=generator).mul(2)
    config = SamplingConfig(temperature=1.0, **cut)
    sampler, noise = Sampler(config), torch.full((40,), 0.5, dtype=torch.float64)
    for token in range(0, 30, 3):
        tokens = torch.full((40, 1), token)
        shift = 0.5 * measure_excess(config, scores, tokens, noise)[:, None]

        def keeps(shifts: Tensor, tokens: Tensor = tokens) -> Tensor:
            return sampler.scores(scores + shifts).gather(-1, tokens)[:, 0].isfinite()

        outside = shift[:, 0] > 0
        assert torch.equal(~outside, keeps(torch.zeros(40, 30)))
        up = torch.zeros_like(scores).scatter(-1, tokens, 1.0)
        ahead = (scores > scores.gather(-1, tokens)).double()
        far = (scores > scores.gather(-1, tokens) + shift).double()
        for shape in (up, -ahead, *torch.rand(5, 40, 30, dtype=torch.float64, generator=generator)):
            assert not bool(keeps(0.999 * shift * shape)[outside].any())
        assert bool(keeps(1.001 * shift * (up - far))[outside].all())


def with_top_p(model: PreTrainedModel, said: float = 0.8, rows: int = 16) -> list[ServedAnswer]:
    """Decoded with a top_p of 0.8, from flat distributions."""
    sampler, coins = Sampler(SamplingConfig(temperature=3.0, top_p=0.8)), torch.Generator().manual_seed(0)

    def choose(logits: Tensor, step: int) -> Tensor:
        return torch.multinomial(sampler.probabilities(logits), 1, generator=coins)[:, 0]

    return [replace(one, temperature=3.0, top_p=said) for one in decode(model, choose, rows=rows)]


def test_what_transformers_would_leave_out_in_the_servers_precision_is_counted_beside(
    path: Path, model: PreTrainedModel
) -> None:
    half = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    counted = []
    for answers, by in ((with_top_p(half, rows=96), half), (with_top_p(model, said=0.7), model)):
        found = judge(by, answers)
        counted.append((found.numbers["not_chosen"], found.numbers["not_chosen_by_transformers"], found.faults))
    (here, own, none), (more, exact, refused_for) = counted
    assert here > 0
    assert own > 0
    assert none == ()
    assert more > 20
    assert exact == 0  # in float32 transformers keeps the cut
    assert any("it leaves the text at" in fault for fault in refused_for)


@pytest.mark.parametrize("lossy", [top_k_not_applied, replaced])
def test_what_the_noise_refuses_is_measured_by_other_readings_of_transformers_too(
    model: PreTrainedModel, lossy: Lossy
) -> None:
    def tipped(*given: Any) -> Reference:
        reference = make_reference(*given)
        return replace(reference, tipping_noise=lambda: (reference.states_noise, 1e9 * reference.logits_noise))

    answers = lossy(model, 0)
    for making, refuses in ((make_reference, True), (tipped, False)):
        with patch("outrider.inference.audit.audit.lossless.make_reference", making):
            found = judge(model, answers)
        assert found.numbers["not_chosen"] > 0
        assert any("another token than the target's" in fault for fault in found.faults) == refuses


def test_a_long_answer_is_read_in_parts_that_bound_memory(model: PreTrainedModel) -> None:
    for lossy in (replaced, one_token_corrupted):
        answers = lossy(model, 0)
        whole = judge(model, answers)
        with (
            patch("outrider.inference.audit.audit.MAX_LOGITS", 10 * model.config.vocab_size + 1),
            patch("outrider.inference.audit.audit.lossless.make_reference", Mock(side_effect=make_reference)) as made,
        ):
            parts = judge(model, answers)
        assert [len(call.args[2]) for call in made.call_args_list] == [10, 10, 10, 10, 8] * len(answers)
        assert [token[:4] for token in parts.at] == [token[:4] for token in whole.at]
        for number in ("tokens", "not_chosen", "sampled_tokens"):
            assert parts.numbers[number] == whole.numbers[number]
        assert [token[:4] for token in parts.unlikeliest] == [token[:4] for token in whole.unlikeliest]


def test_what_rounds_in_half_precision_is_accepted_as_such(path: Path, model: PreTrainedModel) -> None:
    half = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    coins = torch.Generator().manual_seed(0)
    for answers in (greedy(decode(half, likeliest)), decode(half, partial(draw, coins=coins))):
        assert faults(half, answers) == ()
    assert faults(model, greedy(decode(half, likeliest)))  # in float32 it is another target's


def write(file: Path, answers: Sequence[ServedAnswer], **more: object) -> str:
    keys = ("prompt_ids", "output_ids", "temperature")
    file.write_text("".join(json.dumps({key: getattr(a, key) for key in keys} | more) + "\n" for a in answers))
    return str(file)


def test_the_command_says_what_it_found(
    path: Path, model: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    right = write(tmp_path / "right.jsonl", greedy(decode(model, likeliest)))
    given = {"target": str(path), "out_dir": str(tmp_path / "out"), "control": right}
    audit(AuditConfig(**given, answers=right))
    assert "# Audit: only rounding" in capsys.readouterr().out
    refusal("resume=true judges anew", audit, AuditConfig(**given, answers=right))
    wrong = write(
        tmp_path / "wrong.jsonl",
        [*replaced(model, 0), *decode(model, partial(draw, coins=torch.Generator().manual_seed(0)))],
    )
    with pytest.raises(SystemExit) as ended:
        audit(AuditConfig(**given, answers=wrong, resume=True))
    assert ended.value.code == 1
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["arms"]["answers"]["faults"]
    assert report["arms"]["control"]["faults"] == []
    assert len(report["tokens_needed"]) == 4
    page = (tmp_path / "out/report.md").read_text()
    assert "4 tokens are faults: 1:20, 5:20, " in page
    assert "rounding errors |" in page
    assert "| temperature 0.95 for 1 |" in page


@pytest.mark.parametrize("prompt", ["def f", "<s>def f"])
def test_texts_are_tokenised_again_and_counted(path: Path, model: PreTrainedModel, tmp_path: Path, prompt: str) -> None:
    """A prompt has one BOS, whether a template wrote it or not; a tokenizer that adds it adds it to both."""
    target = open_target(str(path), by_layers=False)
    bos = target.tokenizer.bos_token_id
    target.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    assert target.tokenizer("<s>def f")["input_ids"][:2] == [bos, bos]
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": prompt, "text": "oo():"}))
    (answer,) = read_answers(str(tmp_path / "texts.jsonl"), target).values()
    assert answer.prompt_ids == target.tokenizer("def f")["input_ids"]
    assert target.tokenizer.decode(answer.output_ids) == "oo():"
    assert judge(model, [answer]).numbers["retokenised"] == 1


@pytest.mark.parametrize(("line", "named"), [
    ('{"prompt_ids": [1], "output": [2]}', "output"),
    ('{"prompt_ids": [1], "prompt": "a", "output_ids": [2]}', "prompt='a': expected a text or ids, not both"),
    ('{"prompt": "a", "output_ids": [2], "text": "b"}', "text='b': expected a text or ids, not both"),
    (json.dumps({"prompt_ids": [1] * 100, "output_ids": [2] * 157}), "tokens of prompt and output=257: .*256"),
])  # fmt: skip
def test_a_line_that_is_no_answer_is_named(path: Path, tmp_path: Path, line: str, named: str) -> None:
    target = open_target(str(path), by_layers=False)
    good = json.dumps({"prompt_ids": [1] * 100, "output_ids": [2] * 156}) + "\n"
    (tmp_path / "bad.jsonl").write_text(good + line)
    refusal(rf"bad\.jsonl:2: {named}", read_answers, str(tmp_path / "bad.jsonl"), target)

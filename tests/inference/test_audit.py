"""The audit accepts what decodes losslessly and refuses what does not, and its statistics are exact."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from inference.audit.answers import Answer, read_answers
from inference.audit.audit import Arm, audit, judged, read
from inference.audit.draws import LAMBDAS, Draws, draws_of, p_values, refused, tokens_needed
from inference.core.decode import autoregressive, speculative
from inference.core.sampling import Sampler
from inference.core.token_selector import TokenSelector
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import ModelDrafter
from inference.settings.audit import AuditConfig
from inference.settings.sampling import SamplingConfig
from inference.shapes.factory import make_structure
from outrider.errors import UserError
from outrider.streams import Streams
from tests.table_target import TableModel
from tests.tiers import quick_where
from tests.tiny import STRUCTURES as SHAPES
from tests.tiny import make_drafter, method_of, open_stack, random_prompt, save_target

LEVEL = AuditConfig.level
Choose = Callable[[Tensor, int], Tensor]  # logits [rows, V] and the step → tokens [rows]
Lossy = Callable[[PreTrainedModel, int], list[Answer]]
TABLE = TableModel([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.5, 0.0], [0.1, 0.1, 0.1, 0.7], [0.0, 0.0, 1.0, 0.0]])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("audit") / "target", kv_heads=2, peak=3.0, num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def decode(model: PreTrainedModel, choose: Choose, seed: int = 0, rows: int = 16, count: int = 48) -> list[Answer]:
    """Answers of `model` to random prompts, with tokens by `choose`; of temperature 1, whatever that does."""
    prompts = [random_prompt(8, 100 * seed + row) for row in range(rows)]
    cache, fed, said = DynamicCache(), torch.tensor(prompts), []
    for step in range(count):
        logits = model(fed, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        said.append(choose(logits, step))
        fed = said[-1][:, None]
    answers = torch.stack(said, 1).tolist()
    return [Answer(prompt_ids=p, output_ids=a, temperature=1.0) for p, a in zip(prompts, answers, strict=True)]


def greedy(answers: Sequence[Answer]) -> list[Answer]:
    return [replace(answer, temperature=0.0) for answer in answers]


def faults(model: PreTrainedModel, answers: Sequence[Answer], seed: int = 0) -> tuple[str, ...]:
    given = dict(enumerate(answers, 1))
    return judged(read(model, given, Streams(seed)), given, LEVEL).faults


def draw(logits: Tensor, step: int, coins: torch.Generator, temperature: float = 1.0) -> Tensor:
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=coins)[:, 0]


def likeliest(logits: Tensor, step: int) -> Tensor:
    return logits.argmax(-1)


# ---------------------------------------------------------------------------------------------------- exact statistics


def every_token(coin: float) -> tuple[Tensor, Draws]:
    """Every token after every token of the table that can follow it: its probability, and it as a draw."""
    last, token = (TABLE.law > 0).nonzero(as_tuple=True)
    log_p = TABLE.law.log()[last]

    def rand(*shape: Any, **_: object) -> Tensor:
        return torch.full(shape[0] if len(shape) == 1 else shape, coin, dtype=torch.float64)

    with patch("torch.rand", rand):
        return TABLE.law[last, token], draws_of(log_p, log_p, token, torch.Generator())[0]


def test_under_the_targets_law_every_step_is_what_the_tests_take_it_for() -> None:
    """By enumeration: u is uniform, the martingale's steps have the mean 0, this variance and these cumulants."""
    last = (TABLE.law > 0).nonzero()[:, 0]
    weights, low = every_token(0.0)
    _, high = every_token(1.0)
    for state in range(len(TABLE.law)):
        rows = last == state
        pieces: dict[tuple[float, float], float] = {}
        for begin, end, p in zip(low.u[rows].tolist(), high.u[rows].tolist(), weights[rows].tolist(), strict=True):
            piece = (round(begin, 12), round(end, 12))
            pieces[piece] = pieces.get(piece, 0.0) + p
        ends = [0.0, *(end for _, end in sorted(pieces))]
        assert [begin for begin, _ in sorted(pieces)] == ends[:-1]  # they tile [0, 1],
        assert ends[-1] == 1.0
        assert all(p == pytest.approx(end - begin) for (begin, end), p in pieces.items())  # each of density 1
        mine, p = Draws(*(column[rows] for column in low)), weights[rows]
        assert float((p * mine.score).sum()) == pytest.approx(0, abs=1e-12)
        assert float((p * mine.score.square()).sum()) == pytest.approx(float(mine.variance[0]))
        assert torch.allclose((p[:, None] * (LAMBDAS * mine.score[:, None]).exp()).sum(0), mine.cumulants[0].exp())
        assert float(mine.shift.abs().max()) < 1e-12
        for bound in mine.tail.tolist():  # a token so unlikely is no likelier than it says
            assert float(p[mine.tail <= bound].sum()) <= bound + 1e-12


def test_several_tests_refuse_together_as_often_as_one_would() -> None:
    assert refused({"a": 0.0002, "b": 0.00033, "c": 0.0006, "d": 1.0}, 0.001) == ["a", "b"]
    assert refused({"a": 0.0003, "b": 0.0002601, "c": 0.9, "d": 1.0}, 0.001) == []
    assert refused({}, 0.001) == []


def drawn_from(log_p: Tensor, coins: torch.Generator) -> tuple[Draws, dict[str, Draws]]:
    return draws_of(log_p, log_p, torch.multinomial(log_p.exp(), 1, generator=coins)[:, 0], coins)


def test_draws_of_the_target_are_refused_as_seldom_as_the_level_says() -> None:
    """At a level of 0.2, so that it shows: 200 audits of 150 tokens each."""
    coins = torch.Generator().manual_seed(0)
    log_p = TABLE.law.log()[torch.randint(len(TABLE.law), (150,), generator=coins)]
    assert sum(bool(refused(p_values(drawn_from(log_p, coins)[0]), 0.2)) for _ in range(200)) <= 40


def test_the_simulation_needs_more_tokens_for_what_is_less_wrong() -> None:
    coins = torch.Generator().manual_seed(0)
    log_p = torch.randn(500, 40, dtype=torch.float64, generator=coins).mul(2).log_softmax(-1)
    real = [drawn_from(log_p, coins) for _ in range(16)]
    needed = {name: tokens_needed(draws, LEVEL, coins) for name, draws in real[0][1].items()}
    rare, colder, forgotten = (count or 4096 for count in needed.values())
    assert forgotten <= 256
    assert forgotten < min(rare, colder)
    columns = [torch.stack([getattr(draws, name) for draws, _ in real], -1) for name in ("u", "tail", "score")]
    assert tokens_needed(Draws(*columns, *real[0][0][3:]), LEVEL, coins) is None  # no fault, so nothing is seen


# ---------------------------------------------------------------------------------------------------------- whole runs


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
            speculative(stack, ModelDrafter(EarlyExitSource(exit_layer), structure), prompt, **common)
            if drafted
            else autoregressive(stack, prompt, **common)
        )
        rejected += sum(one.drafted - one.accepted for one in rounds)
        accepted += sum(one.accepted for one in rounds)
        said = [token for one in rounds for token in one.tokens]
        assert faults(model, [Answer(prompt_ids=prompt, output_ids=said, temperature=temperature)], seed) == ()
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


def colder(model: PreTrainedModel, seed: int) -> list[Answer]:
    coins = torch.Generator().manual_seed(seed)
    return decode(model, partial(draw, coins=coins, temperature=0.8), seed)


def threshold(model: PreTrainedModel, seed: int) -> list[Answer]:
    """Drafts of a drafter that is too sure are accepted where p > 0.3, else a token is drawn from p."""
    coins = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor, step: int) -> Tensor:
        p, drafted = logits.softmax(-1), draw(logits, step, coins, temperature=0.5)
        accepted = p.gather(-1, drafted[:, None])[:, 0] > 0.3
        return torch.where(accepted, drafted, draw(logits, step, coins))

    return decode(model, choose, seed)


def replaced(model: PreTrainedModel, seed: int) -> list[Answer]:
    """Of 200 greedy tokens one is the second-likeliest."""

    def choose(logits: Tensor, step: int) -> Tensor:
        tokens = logits.topk(2).indices[:, 0]
        if step == 20:
            tokens[::4] = logits[::4].topk(2).indices[:, 1]
        return tokens

    return greedy(decode(model, choose, seed))


def of_another(model: PreTrainedModel, seed: int) -> list[Answer]:
    return greedy(decode(of_another_target(model), likeliest, seed, rows=4))


def greedy_for_drawn(model: PreTrainedModel, seed: int) -> list[Answer]:
    return decode(model, likeliest, seed, rows=4)


def top_k_not_applied(model: PreTrainedModel, seed: int) -> list[Answer]:
    drawn = decode(model, partial(draw, coins=torch.Generator().manual_seed(seed)), seed)
    return [replace(answer, top_k=20) for answer in drawn]


def one_token_corrupted(model: PreTrainedModel, seed: int) -> list[Answer]:
    """A single drawn token of all is the least likely one."""
    coins = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor, step: int) -> Tensor:
        tokens = draw(logits, step, coins, temperature=0.3)
        if step == 20:
            tokens[0] = logits[0].argmin()
        return tokens

    return [replace(answer, temperature=0.3) for answer in decode(model, choose, seed)]


LOSSY = (replaced, colder, threshold, of_another, greedy_for_drawn, top_k_not_applied, one_token_corrupted)


@pytest.mark.parametrize("lossy", quick_where(lambda one: one in (replaced, colder), LOSSY))
def test_what_is_lossy_is_refused(
    model: PreTrainedModel, lossy: Callable[[PreTrainedModel, int], list[Answer]]
) -> None:
    for seed in range(2):
        assert faults(model, lossy(model, seed), seed), seed


def test_faults_are_found_where_they_are(model: PreTrainedModel) -> None:
    for lossy, lines in ((replaced, set(range(1, 17, 4))), (one_token_corrupted, {1})):
        given = dict(enumerate(lossy(model, 0), 1))
        at = judged(read(model, given, Streams(0)), given, LEVEL).at
        assert {(token.line, token.position) for token in at} == {(line, 20) for line in lines}
        if lossy is replaced:
            for token in at:
                assert token.likeliest != token.token == given[token.line].output_ids[20]


def test_tokens_that_were_drawn_among_the_likeliest_are_accepted_where_it_is_said(model: PreTrainedModel) -> None:
    coins = torch.Generator().manual_seed(0)
    said = {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.0}
    sampler = Sampler(SamplingConfig(**said))
    drawn = decode(model, lambda logits, _: torch.multinomial(sampler.probabilities(logits), 1, generator=coins)[:, 0])
    told = [replace(answer, **said) for answer in drawn]
    assert faults(model, told) == ()
    assert faults(model, drawn)  # said to be of temperature 1


def test_what_rounds_in_half_precision_is_accepted_as_such(path: Path, model: PreTrainedModel) -> None:
    half = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    coins = torch.Generator().manual_seed(0)
    for answers in (greedy(decode(half, likeliest)), decode(half, partial(draw, coins=coins))):
        assert faults(half, answers) == ()
    assert faults(model, greedy(decode(half, likeliest)))  # in float32 it is another target's


# --------------------------------------------------------------------------------------------------------- the command


def write(file: Path, answers: Sequence[Answer], **more: object) -> str:
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
    with pytest.raises(UserError, match="resume=true makes it anew"):
        audit(AuditConfig(**given, answers=right))
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
    assert len(report["tokens_needed"]) == 3
    page = (tmp_path / "out/report.md").read_text()
    assert "4 tokens are faults: 1:20, 5:20, " in page
    assert "rounding errors |" in page
    assert "| temperature 0.95 for 1 |" in page


def test_texts_are_tokenised_again_and_counted(path: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    from draft_models.targets.open_target import open_target

    target = open_target(str(path), by_layers=False)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": "def f", "text": "oo():"}) + "\n")
    (answer,) = read_answers(str(tmp_path / "texts.jsonl"), target).values()
    assert answer.prompt_ids == target.tokenizer("def f")["input_ids"]
    assert target.tokenizer.decode(answer.output_ids) == "oo():"
    given = {1: answer}
    assert judged(read(model, given, Streams(0)), given, LEVEL).numbers["retokenised"] == 1
    assert Arm().sampled == []
    for line, named in (
        ('{"prompt_ids": [1], "output_ids": [999999]}', "output_ids"),
        ('{"prompt_ids": [1], "output_ids": []}', "output_ids"),
        ('{"prompt_ids": [1], "output": [2]}', "output"),
        ('{"prompt_ids": [1], "output_ids": [2], "temperature": -1}', "temperature"),
    ):
        (tmp_path / "bad.jsonl").write_text(line)
        with pytest.raises(UserError, match=rf"bad\.jsonl:1: {named}"):
            read_answers(str(tmp_path / "bad.jsonl"), target)

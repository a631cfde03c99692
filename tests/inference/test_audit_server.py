"""A server that is asked by the audit: its answers are judged, kept, and asked for once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.base.errors import UserError
from outrider.inference.audit.audit import audit
from outrider.inference.settings.tools import AuditConfig
from tests.inference.batch.responding import letter_tokenizer, save_answering
from tests.inference.batch.serving import Engine, serving
from tests.refusals import refusal

PROMPTS = 14
ENDS = [257, *range(182, 187)]  # the end token, and others, so that answers end after a while
Configure = Callable[..., AuditConfig]
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_answering(tmp_path_factory.mktemp("target"), ENDS, peak=2.0, num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target).eval()


@pytest.fixture
def configure(target: Path, tmp_path: Path) -> Configure:
    """An audit of the server at a URL, with an out_dir of its own by name."""
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"turns": [f"question {i}", "more"]}) + "\n" for i in range(PROMPTS)))

    def make(url: str, name: str = "out", **values: Any) -> AuditConfig:
        given = {"max_new_tokens": 24, "concurrency": 3, "prompts": str(asked), **values}
        return AuditConfig(target=str(target), server=url, out_dir=str(tmp_path / name), **given)

    return make


def engine(model: PreTrainedModel, *fault: Any, **shown: Any) -> Engine:
    return Engine(model, letter_tokenizer(), ENDS, *fault, **shown)


def lines(config: AuditConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out_dir) / "answers.jsonl").read_text().splitlines()]


def numbers(config: AuditConfig) -> dict[str, float]:
    return json.loads((Path(config.out_dir) / "report.json").read_text())["arms"]["answers"]["numbers"]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}]
)
def test_a_faithful_server_is_accepted(
    model: PreTrainedModel, configure: Configure, sampling: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(served := engine(model)) as url:
        audit(config := configure(url, **sampling))
    assert f"# Audit: only rounding\n\nIs {url} what " in capsys.readouterr().out
    found = numbers(config)
    assert (found["prompts"], found["answers"], found["unanswered"]) == (PROMPTS, PROMPTS, 0)
    assert served.count == PROMPTS + 1  # which it is tried out by
    for line in lines(config):
        assert {name: line[name] for name in sampling} == sampling
        assert len(line["output_ids"]) == 24 or line["output_ids"][-1] in ENDS
        assert letter_tokenizer().decode(line["prompt_ids"]).endswith("</s>a:")
    assert len({tuple(line["output_ids"]) for line in lines(config)}) > 1


def test_a_lossy_server_is_refused_and_its_replies_are_not(model: PreTrainedModel, configure: Configure) -> None:
    """Also where its own log-probabilities say that a token is not the likeliest, which an own run would not keep."""

    def swap(number: int, reply: dict[str, Any]) -> dict[str, Any]:
        choice = reply["choices"][0]
        if number % 5 == 4:
            choice["token_ids"][-1] = (choice["token_ids"][-1] + 1) % 100
        return reply

    with serving(engine(model, swap)) as url, pytest.raises(SystemExit) as ended:
        audit(config := configure(url, concurrency=1))
    assert ended.value.code == 1
    report = json.loads((Path(config.out_dir) / "report.json").read_text())
    at = report["arms"]["answers"]["at"]
    assert [(line, place) for line, place, *_ in at] == [(4, 23), (9, 23), (14, 23)]  # the first request is no prompt's

    colder = AutoModelForCausalLM.from_config(model.config).eval()
    colder.load_state_dict(model.state_dict())
    with torch.no_grad():
        colder.lm_head.weight.mul_(1.5)
    with serving(engine(colder)) as url, pytest.raises(SystemExit):
        audit(configure(url, name="colder", temperature=1.0, max_new_tokens=60))


def test_a_killed_audit_asks_for_what_is_missing(
    model: PreTrainedModel, configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = [6]

    def breaks(number: int, reply: dict[str, Any]) -> dict[str, Any] | int:
        return reply if number < limit[0] else 503

    few = {"concurrency": 1, "server_retries": 0}
    with serving(served := engine(model, breaks)) as url:
        with pytest.raises(UserError, match="go on with resume=true"):
            audit(config := configure(url, **few))
        before = lines(config)
        assert len(before) == 5
        limit[0] = 1000
        refusal("resume=true judges anew, and asks a server what is missing", audit, configure(url, **few))
        refusal(r"temperature=1.0 \(was 0.0\)", audit, configure(url, **few, resume=True, temperature=1.0))
        with serving(engine(model)) as other:  # another server's answers are not its own
            refusal(r"server=", audit, configure(other, **few, resume=True))
        served.count = 0
        audit(configure(url, **few, resume=True))
        assert served.count == 1 + PROMPTS - len(before)
    assert lines(config)[: len(before)] == before
    assert len({tuple(line["prompt_ids"]) for line in lines(config)}) == PROMPTS == numbers(config)["answers"]
    with serving(whole := engine(model)) as url:
        audit(other := configure(url, name="other"))
    assert whole.count == 1 + PROMPTS
    assert sorted(map(str, lines(other))) == sorted(map(str, lines(config)))


def test_what_the_judge_lacks_is_said_before_the_server_is_asked(model: PreTrainedModel, configure: Configure) -> None:
    with serving(served := engine(model)) as url:
        refusal("device=cuda:9", audit, configure(url, device="cuda:9"))
        refusal("nowhere.jsonl: cannot be read", audit, configure(url, control="nowhere.jsonl"))
    assert served.count == 0


@pytest.mark.parametrize("said", [True, False])
def test_answers_without_ids_are_tokenised_again_and_the_page_says_so(
    model: PreTrainedModel, configure: Configure, said: bool
) -> None:
    """Also where it does not say which end token it was, of many; and a text that gives other tokens is left out."""

    def ends(number: int, reply: dict[str, Any]) -> dict[str, Any]:
        reply["choices"][0] |= {} if said else {"stop_reason": None}
        if number == 3:
            reply["usage"]["completion_tokens"] += 7
        return reply

    with serving(engine(model, ends, ids=False)) as url:
        audit(config := configure(url, temperature=1.0))
    found, page = numbers(config), (Path(config.out_dir) / "report.md").read_text()
    assert (found["answers"], found["retokenised"], found["unanswered"]) == (PROMPTS - 1, PROMPTS - 1, 1)
    assert f"{PROMPTS - 1} answers came as text and were tokenised again" in page
    ended = [line["output_ids"][-1] in ENDS for line in lines(config)]
    assert any(ended) == said


def test_a_server_that_answers_nothing_is_named(model: PreTrainedModel, configure: Configure) -> None:
    with (
        serving(engine(model, lambda number, reply: reply if number == 0 else 400)) as url,
        pytest.raises(UserError, match=r"server='http.*: expected one that answers a prompt"),
    ):
        audit(configure(url, num_prompts=2))

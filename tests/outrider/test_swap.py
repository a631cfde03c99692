"""POST /v1/drafter: another drafter without a request lost; every text stays the target's own."""

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

import outrider
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.vocabulary import vocabulary_digest
from outrider.inference.core.rounds import Round
from outrider.inference.loading.target_setup import config_with_drafter
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.settings.tools import ServeConfig
from outrider.server import app
from outrider.server.front import Front
from tests.faults import plant
from tests.outrider.test_serve import JSON, TALK, TEMPLATE, Slow, ask, serving, text_of, until_true
from tests.support.planted_faults import noisy_logits
from tests.tiny import save_exit, save_target

SHORT = StopConfig(max_draft=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_target(tmp_path_factory.mktemp("target"), eos_token_id=999)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of each kind for the target; `other` is of another one."""
    folder = tmp_path_factory.mktemp("drafters")
    save_exit(folder / "exit", target, 3)
    save_exit(folder / "noisy", target, 1, noise=2.0)
    save_target(folder / "lm", seed=0, num_hidden_layers=1)
    tokenizer = outrider.load(str(target), device="cpu").tokenizer
    table = TrigramTable.from_documents([[*range(200)]], [2, 3], 259, vocabulary_digest(tokenizer.get_vocab()))
    table.save(folder / "table")
    save_exit(folder / "other", save_target(folder / "another", seed=5), 3)
    (folder / "empty").mkdir()
    return {path.name: path for path in folder.iterdir()}


def test_another_drafter_leaves_none_of_before(target: Path, drafters: dict[str, Path]) -> None:
    config = EvaluateConfig(target=str(target), mtp="elsewhere", methods={"m": MethodConfig("mtp")})
    swapped = config_with_drafter(config, load(target).setup, str(drafters["lm"]))
    assert (swapped.mtp, swapped.checkpoint) == (None, str(drafters["lm"]))


def load(target: Path, **options: Any) -> Any:
    method = options.pop("method", MethodConfig("prompt_lookup", stop=SHORT))
    return outrider.load(str(target), device="cpu", method=method, **options)


@pytest.fixture(scope="module")
def plain(target: Path) -> str:
    """What plain decoding writes."""
    return str(load(target, method="vanilla", small_lm=str(target)).generate(TALK, max_new_tokens=16))


def swap(url: str, folder: Path | str) -> httpx.Response:
    return httpx.post(f"{url}/v1/drafter", json={"checkpoint": str(folder)}, timeout=60)


def accepted_by(answers: list[Future[Any]]) -> list[int]:
    """How many tokens of each answer were drafted."""
    usages = [answer.result().usage.completion_tokens_details for answer in answers]
    return [usage.accepted_prediction_tokens for usage in usages]


class Held(Slow):
    """A slow model whose decoders with other drafters are not slow."""

    def with_drafter(self, checkpoint: str) -> Any:
        return self.model.with_drafter(checkpoint)


def test_no_request_is_lost_and_every_text_is_the_targets(
    target: Path, drafters: dict[str, Path], plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Held(load(drafters["noisy"], method=MethodConfig(stop=SHORT), name="fixed"))
    with serving(slow, batch=2, queue=16) as (url, service, client), ThreadPoolExecutor(16) as pool:
        running = [pool.submit(ask, client) for _ in range(3)]  # the third waits
        until_true(lambda: slow.begun == 2 and len(service.workers.open) == 3)
        swapped = pool.submit(swap, url, drafters["exit"])
        slow.go.set()  # the new drafter is measured between rounds of the texts
        assert swapped.result().json()["method"] == "fixed"
        before = [pool.submit(ask, client) for _ in range(4)]
        methods = [swap(url, drafters[name]).json()["method"] for name in ("lm", "table", "exit", "exit")]
        assert methods == ["small_lm/survival", "ngrams", "eesd_survival", "eesd_survival"]  # the default of a new kind
        after = [pool.submit(ask, client) for _ in range(4)]
        assert {text_of(answer.result()) for answer in [*running, *before, *after]} == {plain}
        assert slow.begun == 3  # also the text that waited has the drafter with which its request was read
        assert (
            min(accepted_by(before)) >= 11 > max(accepted_by(running))
        )  # an exit of all layers drafts what the target writes
        with noisy_logits(3.0, Random(0)):
            assert text_of(ask(client)) != plain
        plant(monkeypatch, app.Service, "swap_drafter", "self.model = model", "pass")
        swap(url, drafters["table"])
        assert service.about()["method"] == "eesd_survival"


def test_a_running_text_goes_on_while_a_drafter_is_loaded(target: Path, drafters: dict[str, Path], plain: str) -> None:
    """Its rounds before the swap are the old drafter's, those after it too."""
    model = load(target)
    rounds = model.rounds(TALK, max_new_tokens=16)
    tokens = [*next(rounds).tokens, *next(rounds).tokens]
    other = model.with_drafter(str(drafters["exit"]))
    assert other.generate(TALK, max_new_tokens=16) == plain
    tokens += [token for r in _read(rounds) for token in r.tokens]
    assert model.tokenizer.decode(tokens) == plain == model.generate(TALK, max_new_tokens=16)


def _read(rounds: Iterator[Round]) -> list[Round]:
    read = [*rounds]
    assert all(r.source != "table" for r in read)
    return read


def test_buffers_for_an_earlier_drafter_go_with_it(target: Path, drafters: dict[str, Path]) -> None:
    model = load(target, method=MethodConfig("small_lm", stop=SHORT), small_lm=str(drafters["lm"]), runtime="graphed")
    model.generate(TALK, max_new_tokens=4)
    earlier = weakref.ref(model.drafters["small_lm"].layered)
    model = model.with_drafter(str(drafters["table"]))
    gc.collect()
    assert earlier() is None


@pytest.mark.parametrize(
    ("name", "words"),
    [("none", "no such directory"), ("empty", "found nothing"), ("other", "target"), ("target", None)],
)
def test_a_bad_drafter_is_refused_and_the_old_one_stays(
    target: Path, drafters: dict[str, Path], plain: str, name: str, words: str | None
) -> None:
    folder = {**drafters, "none": target / "none", "target": target}[name]
    with serving(load(target)) as (url, service, client):
        model, answer = service.model, swap(url, folder)
        if words is None:  # the target is a causal LM of its own vocabulary: it drafts for itself
            assert answer.status_code == 200
        else:
            assert (answer.status_code, service.model) == (400, model)
            assert words in answer.json()["error"]["message"]
        assert text_of(ask(client)) == plain
        for body in ("{}", '{"checkpoint": 3}', '{"checkpoint": "x", "y": 1}'):
            assert httpx.post(f"{url}/v1/drafter", content=body, headers=JSON).status_code == 400


def test_only_who_is_allowed_gives_a_drafter(target: Path, drafters: dict[str, Path]) -> None:
    """A path names files of the server's machine. By default a client of another machine cannot name any."""
    model = load(target)

    def status(client: str, **options: Any) -> int:
        config = ServeConfig(target="t", name="tiny", host="0.0.0.0", **options)
        service = app.Service(model, config)
        transport = httpx.ASGITransport(Front(app.make_app(service), config), client=(client, 9))

        async def ask_for_it() -> int:
            async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.9") as http:
                body = json.dumps({"checkpoint": str(drafters["table"])})
                headers = JSON | {"Authorization": "Bearer key"}
                return (await http.post("/v1/drafter", content=body, headers=headers)).status_code

        try:
            return asyncio.run(ask_for_it())
        finally:
            service.close()

    for client, expected in (("127.0.0.1", 200), ("::1", 200), ("10.0.0.7", 403), ("unknown", 403)):
        assert status(client) == expected
        assert status(client, remote_swap=True) == 200
    assert status("127.0.0.1", api_key="another") == 401
    assert status("127.0.0.1", api_key="key") == 200

"""Decoding from Python: the target's own text, by every way to ask for it."""

import inspect
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM

import outrider
from outrider.api import decoder as api
from outrider.api.model import Model
from outrider.base.errors import UserError
from outrider.data_prep.text import chat
from outrider.draft_models.targets.settings import DFLASH, EAGLE3, EARLY_EXIT, SMALL_LM, TABLE, TARGET
from outrider.inference.core.batch import Batch
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.settings.sampling import SamplingConfig, Verification
from tests.refusals import refusal
from tests.support.planted_faults import rope_scaled
from tests.tiny import LAYERS, save_exit, save_target, unproven

ROOT = Path(__file__).parents[2]
PROMPT = "def f("  # its greedy text has 15 different tokens
DEFAULTS = {  # of a drafter in such a folder
    EAGLE3: "eagle3_survival", DFLASH: "dflash_survival", TABLE: "ngrams", SMALL_LM: "small_lm_survival"
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose greedy text is no single token over and over, and a drafter for it."""
    path = save_target(tmp_path_factory.mktemp("models") / TARGET, kv_heads=2, seed=1)
    save_exit(path.parent / EARLY_EXIT, path, LAYERS - 1, noise=0.1)
    return path.parent


def shown_by_letters(loaded: Any) -> Any:
    """Tokens are bytes that make no characters: each is shown as a letter of its own."""
    loaded.tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return loaded


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return shown_by_letters(outrider.load(folder / EARLY_EXIT, device="cpu"))


def by_transformers(model: Any, prompt: str, **options: Any) -> str:
    """What `generate` continues `prompt` with, by the target alone."""
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model.setup.target.source), model.tokenizer
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), tokenizer=tokenizer, **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_importing_is_quick_and_decoding_loads_the_runtime_alone(folder: Path) -> None:
    """No report, no doctor, no command, no plots, before a text and after; of measuring what "auto" sizes ask for."""
    code = f"""import sys, outrider
def tell(): print(*(name for name, of in sys.modules.items() if not hasattr(of, '__path__') or '.' not in name))
tell()
load = outrider.load
tell()
load({str(folder / EARLY_EXIT)!r}, device="cpu").generate({PROMPT!r}, max_new_tokens=4)
tell()"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, *told = (line.split() for line in run.stdout.splitlines() if "outrider.base.errors" in line)
    assert {"torch", "transformers", "hydra"}.isdisjoint(first)
    away = r"(outrider\.(commands|cli|inference\.(measure|report|doctor|evaluate))|matplotlib)\b"
    found = [[name for name in names if re.match(away, name)] for names in told]
    assert found == [[], ["outrider.inference.measure.probe"]]
    before, after = (sum(name.startswith("outrider.") for name in names) for names in told)
    assert 50 < before <= 80
    assert before + 20 < after <= 116
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        outrider.lode  # noqa: B018


@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 40}, {"max_new_tokens": 30, "repetition_penalty": 1.3}, {"max_new_tokens": 1}],
    ids=str,
)
def test_greedy_text_is_the_targets_own(model: Any, options: dict[str, Any]) -> None:
    expected = by_transformers(model, PROMPT, do_sample=False, **options)
    assert model.generate(PROMPT, **options) == expected
    pieces = list(model.stream(PROMPT, **options))
    assert "".join(pieces) == expected
    assert model.last.tokens <= options["max_new_tokens"]
    if options["max_new_tokens"] == 40:
        assert len(pieces) > 3
        assert len(set(expected)) > 10
        assert model.last.passes == pytest.approx((model.last.tokens - 1) / model.last.tau)
        assert 1 <= model.last.tau < 40


@pytest.mark.slow
def test_a_fault_of_the_runtime_shows(folder: Path, model: Any) -> None:
    """What the test above compares is not the same thing twice; a report of such text says so, and ends nothing."""
    expected = by_transformers(model, PROMPT, do_sample=False, max_new_tokens=40)
    with rope_scaled(1.5), pytest.raises(UserError, match="differ from its own forward's by"):
        outrider.load(folder / EARLY_EXIT, device="cpu")
    with rope_scaled(1.5), unproven():
        faulty = shown_by_letters(outrider.load(folder / EARLY_EXIT, device="cpu"))
        assert faulty.generate(PROMPT, max_new_tokens=40) != expected
        assert faulty.report([PROMPT], max_new_tokens=40)["verdict"] == "target differs"


def test_the_thread_that_decodes_uses_the_device_of_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a second GPU's graphs would be captured on the first one."""
    begun = []
    monkeypatch.setattr(api, "use_device", lambda device: begun.append((device, threading.current_thread())))
    loaded = outrider.load(folder / EARLY_EXIT, device="cpu")
    loaded.generate("ab", max_new_tokens=2)
    assert begun[0][0] == loaded.setup.device
    assert all(thread is not threading.main_thread() for _, thread in begun)


def test_a_seed_gives_the_same_text_again_and_another_seed_another(model: Any) -> None:
    texts = [model.generate(PROMPT, max_new_tokens=24, do_sample=True, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    likeliest = model.generate(PROMPT, max_new_tokens=24, do_sample=True, top_k=1)
    assert likeliest == model.generate(PROMPT, max_new_tokens=24)


def test_drafts_are_verified_by_the_rule_of_the_method(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(wraps=TokenSelector)
    monkeypatch.setattr(api, "TokenSelector", made)
    for verify in get_args(Verification):
        list(model.by(MethodConfig(verify=verify)).rounds(PROMPT, SamplingConfig(1.0)))
    assert [one.args[2] for one in made.call_args_list] == list(get_args(Verification))


def test_the_target_says_the_same_with_its_drafter_without_it_and_with_another(model: Any) -> None:
    """And is loaded once. The rounds tell what was drafted."""
    other = model.by("prompt_lookup")
    fixed = model.by(MethodConfig("early_exit", stop=StopConfig(max_draft=3)))
    asked = ((fixed, True), (model, False), (other, True))
    rounds = [list(one.rounds(PROMPT, max_new_tokens=12, speculate=drafted)) for one, drafted in asked]
    drafted, plain, again = [[token for r in each for token in r.tokens] for each in rounds]
    assert drafted == plain == again
    assert sum(r.accepted for r in rounds[0]) > 0
    assert {(len(r.tokens), r.accepted) for r in rounds[1]} == {(1, 0)}
    assert other.stack is model.stack
    for unknown, message in (
        ("nobody", "method=nobody: no such method"),
        ("vanilla", "small_lm: missing; give it as small_lm=VALUE: a causal"),
    ):
        refusal(message, model.by, unknown)


def test_messages_go_through_the_chat_template(tiny_models: Path) -> None:
    model = outrider.load(str(tiny_models / TARGET), device="cpu")
    messages = [{"role": "user", "content": "hello"}]
    refusal(r"has no chat template, .* template=vicuna", model.generate, messages)
    bare = outrider.load(str(tiny_models / TARGET), device="cpu", template="none")
    assert bare.generate(messages, max_new_tokens=8) == model.generate("hello", max_new_tokens=8)
    model.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    said = model.generate(messages, max_new_tokens=8)
    assert said == model.generate("<user>hello", max_new_tokens=8)


@pytest.mark.parametrize(
    ("given", "method"),
    [({}, "prompt_lookup"), ({"small_lm": SMALL_LM, "method": "opt_tree"}, "opt_tree"),
     ({"table": TABLE, "method": "aded"}, "aded"),
     ({"method": MethodConfig("prompt_lookup", stop=StopConfig(max_draft=2))}, "method"),
     *(({place: held}, name) for held, name in DEFAULTS.items() for place in (held, "source"))],
    ids=str,
)  # fmt: skip
def test_any_kind_drafts(tiny_models: Path, folder: Path, given: dict[str, Any], method: str) -> None:
    """Named beside its target, or in the first place."""
    given = {key: str(tiny_models / value) if key != "method" else value for key, value in given.items()}
    target = str(folder / TARGET)
    asked = {"source": target, **given} if "source" not in given else {**given, "target": target}
    model = shown_by_letters(outrider.load(**asked, device="cpu"))
    assert model.name == method
    assert repr(model) == f"Model(target={target!r}, method={method!r}, dtype='float32', device='cpu')"
    assert {*model.drafters} <= {model.method.source}
    expected = by_transformers(model, PROMPT, do_sample=False, max_new_tokens=16)
    assert model.generate(PROMPT, max_new_tokens=16) == expected


@pytest.mark.slow
def test_a_report_is_that_of_the_command(model: Any, tmp_path: Path) -> None:
    report = model.report(
        [PROMPT, ["a question?", "and then?"]], max_new_tokens=6, template="none", out_dir=str(tmp_path / "kept")
    )
    assert (report["method"], report["lossless"]["identical"], report["turns"]) == ("eesd_survival", 3, 3)
    assert (tmp_path / "kept/report.md").exists()
    assert model.report([PROMPT], max_new_tokens=4)["prompts"] == 1
    refusal("prompts=", model.report, [])


def test_what_cannot_be_is_refused(model: Any, tiny_models: Path) -> None:
    for options, message in (
        ({"temperature": 0.5}, r"temperature=0\.5: expected 1\.0 unless do_sample=True"),
        ({"do_sample": True, "temperature": 0}, "temperature=0: expected a number > 0"),
        ({"max_new_tokens": 10_000}, "exceeds the target's context"),
    ):
        refusal(message, model.generate, PROMPT, **options)
    target = str(tiny_models / TARGET)
    for source, given, message in (
        (target, {"method": "eesd"}, "method=eesd: no such method; did you mean 'eesd_.*'. There are aded, "),
        (target, {"method": "eesd_beta"}, "checkpoint: missing; .* an early-exit drafter directory for eesd_beta"),
        (target, {"method": "ngrams"}, "table: missing; give it as table=VALUE: an n-gram table directory"),
        ("nowhere", {"target": target}, r"target=.*nowhere is no drafter"),
    ):
        refusal(message, outrider.load, source, **given)


MESSAGE = {"role": "user", "content": "hi"}
ODD = (None, "x", "", -1, 1.5, float("nan"), True, [], [1], {"a": 1}, object())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["def f(", ["class A:"]], r"prompt\[1\]=\['class A:'\]: expected one text, one conversation"),
        ([[1, 2], [3, 9999]], r"prompt\[1\]\[1\]=9999: expected a token id of the target: 0 to "),
        ([-1], r"prompt\[0\]=-1: expected a token id"),
        (["def f(", ""], r"prompt\[1\]='': expected at least one token"),
        ([1, "a"], r"prompt=\[1, 'a'\]: expected one text, "),
        ([{"rol": "user", "content": "hi"}], r"prompt\[0\]=.*; did you mean 'role'\?"),
        ([MESSAGE, {"role": "user", "content": 5}], r"prompt\[1\]=.*: expected a text as its 'role' and one as its"),
        ([{"role": "usr", "content": "hi"}], "'usr': expected one of system, user, assistant; did you mean 'user'"),
        ([MESSAGE, {"role": "assistant", "content": "hi"}], "the last message asks"),
        *((odd, "prompt") for odd in (*ODD[3:], None, MESSAGE, b"ab", [None], "") if odd != [1]),
    ],
    ids=lambda value: repr(value).split(" at ")[0],
)
def test_what_is_no_prompt_is_refused_by_what_it_is(
    model: Any, prompt: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is decoded, also what comes before it in a list."""
    monkeypatch.setattr(model, "_decode", Mock(side_effect=AssertionError))
    refusal(message, model.generate, prompt, max_new_tokens=2)


def test_a_prompt_is_a_text_or_its_tokens_and_a_list_of_prompts_gives_a_list_of_texts(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them as if it were alone, sampled text too; text i has the seed + i, so equal prompts differ."""
    texts = [PROMPT, "class A:", PROMPT]
    ids = [model.tokenizer(text)["input_ids"] for text in texts]
    options: dict[str, Any]
    for options in ({"max_new_tokens": 12}, {"max_new_tokens": 8, "do_sample": True, "seed": 3}):
        alone = [model.generate(text, **{**options, "seed": 3 + number}) for number, text in enumerate(texts)]
        assert alone[0] != alone[1]
        assert (alone[0] == alone[2]) == ("seed" not in options)
        assert model.generate(ids[0], **options) == "".join(model.stream(ids[0], **options)) == alone[0]
        assert model.generate(texts, **options) == model.generate(tuple(ids), **options) == alone
    monkeypatch.setattr(model._worker.batch, "budget", replace(model.budget, max_bytes=1))  # decoded in turn
    assert model.generate(texts, **options) == alone
    refusal("stream a prompt at a time: only generate takes a list of them", model.stream, texts)


def test_each_prompt_of_a_list_may_have_options_of_its_own(model: Any) -> None:
    texts = [PROMPT, "class A:", "import os"]
    each: list[dict[str, Any]] = [{"seed": 7}, {"max_new_tokens": 3}, {"stop_strings": ["e", "a"]}]
    shared = {"max_new_tokens": 9, "do_sample": True}
    alone = [model.generate(text, **{**shared, "seed": i, **each[i]}) for i, text in enumerate(texts)]
    assert model.generate(texts, each=each, **shared) == alone
    for wrong in (each[:2], [{}, {}, {"sede": 1}]):
        refusal(r"each=|sede", model.generate, texts, each=wrong)


def test_a_text_that_fails_or_is_given_up_leaves_the_others_alone(model: Any) -> None:
    whole = model.generate(PROMPT, max_new_tokens=30)
    given_up, other = model.stream(PROMPT, max_new_tokens=200), model.stream(PROMPT, max_new_tokens=30)
    pieces = [next(given_up), next(other)]
    given_up.close()
    failing = model._worker.rounds(iter(map(int, "x")))
    with pytest.raises(ValueError, match="invalid literal"):
        next(failing)
    assert "".join([pieces[1], *other]) == whole
    assert not model._worker.batch.texts


@pytest.mark.parametrize("runtime", ["graphed", "eager"])
def test_threads_share_passes_or_take_turns_and_get_the_texts_that_they_would_get_alone(
    folder: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that ask for a piece each, and with two methods before one target."""
    first = shown_by_letters(outrider.load(folder / EARLY_EXIT, device="cpu", runtime=runtime, batch=3))
    models = [first, first.by("prompt_lookup")]
    alone = {prompt: first.generate(prompt, max_new_tokens=12) for prompt in (PROMPT, "class A:", "import os")}
    seen, step = [(0, 0)], Batch.step  # texts, and those that wait for a pass

    def watched(batch: Batch) -> None:
        time.sleep(0.002)  # in which another thread would begin
        step(batch)
        seen.append((len(batch.texts), sum(text.pending is not None for text in batch.texts)))

    monkeypatch.setattr(Batch, "step", watched)
    asked = [*alone] * 4
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda n: models[n % 2].generate(asked[n], max_new_tokens=12), range(len(asked)))
        assert [*texts] == [alone[prompt] for prompt in asked]
        streams = [first.stream(prompt, max_new_tokens=12) for prompt in alone]
        pieces = [[*pool.map(lambda stream: next(stream, ""), streams)] for _ in range(14)]
    assert ["".join(text) for text in zip(*pieces, strict=True)] == [*alone.values()]
    assert max(seen)[0] == 3  # the option `batch`
    assert any(waiting > 1 for _, waiting in seen) == (runtime == "eager")


@pytest.mark.parametrize("name", [*[*inspect.signature(Model.stream).parameters][2:], "max_tokens"])
def test_an_option_is_read_or_refused_by_its_name(model: Any, name: str) -> None:
    """Whatever it is given: no other error than a `UserError` leaves the library."""
    for sampled in (False, True):
        for odd in ODD:
            given = {"max_new_tokens": 2, "do_sample": sampled, name: odd}
            said = name
            try:
                model.generate(PROMPT, **given)
            except UserError as error:
                said = str(error)
            assert name in said
    for asked in (model.generate, model.stream, model.rounds, model.report, outrider.load):
        refusal(rf"{asked.__name__}\(max_neww_tok=…\): no such option", asked, "x", max_neww_tok=3)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_stream_that_is_left_unfinished_ends_with_the_process(folder: Path) -> None:
    code = f"""
import threading, outrider
model = outrider.load({str(folder / EARLY_EXIT)!r}, device="cpu")
pieces, rounds = model.stream("def f("), model.rounds("def f(", speculate=False)
next(pieces), next(rounds)
threading.Thread(target=lambda: print(len(model.generate("a")))).start()
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Exception" not in run.stderr
    assert int(run.stdout.split()[-1]) > 0  # by a thread that outlives the main one


@pytest.mark.slow
def test_the_page_runs(tiny_models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """docs/python.md, with the demo's products replaced by tiny ones."""
    (tmp_path / "runs/demo").mkdir(parents=True)
    for name, own in (("eesd", EARLY_EXIT), ("target", TARGET), ("small_lm", SMALL_LM), ("trigrams", TABLE)):
        (tmp_path / "runs/demo" / name).symlink_to(tiny_models / own)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    load, here = outrider.load, {"target": "runs/demo/target"}

    def load_here(source: str, **given: Any) -> Any:
        return load(source, **(here if "eesd" in source else {}), **given)

    monkeypatch.setattr(outrider, "load", load_here, raising=False)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert names["report"]["lossless"]["identical"] == 2


def test_a_prompt_that_takes_long_delays_nobody(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tokenised before its turn; and no more of it than shows that it does not fit."""
    model = outrider.load(str(tiny_models / TARGET), device="cpu")
    real, waiting, go_on, sizes = chat.tokenize, threading.Event(), threading.Event(), list[int]()

    def slow(tokenizer: Any, texts: list[str], **options: bool) -> Any:
        sizes.append(len(texts[0]))
        if texts[0].startswith("slow"):
            waiting.set()
            assert go_on.wait(60)
        return real(tokenizer, texts, **options)

    expected = model.generate("slow", max_new_tokens=4)
    monkeypatch.setattr(chat, "tokenize", slow)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(model.generate, "slow", max_new_tokens=4)
        assert waiting.wait(60)
        try:
            assert model.generate("quick", max_new_tokens=4)
        finally:
            go_on.set()
        assert other.result() == expected
    for prompt in ("x" * 10**7, [{"role": "user", "content": "x" * 10**7}], ["a", "x" * 10**7]):
        refusal(r"context|template", model.generate, prompt, max_new_tokens=4)
    assert max(sizes) < 10**6

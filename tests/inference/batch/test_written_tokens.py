"""Answers are the target's tokens: what is trained on is what the target has read, then what it has written.

The target is scripted: it writes an answer in tokens that its text need not give, and notes what it has read.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.base import errors
from outrider.base.errors import UserError
from outrider.data_prep.ngrams.token_shards import passages
from outrider.data_prep.text import documents
from outrider.data_prep.text.records import TokenisedText
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.encoder import open_encoder
from outrider.draft_models.targets.open_target import load_tokenizer
from outrider.inference.audit.answers import read_answers
from outrider.inference.batch import generate as responses_module
from outrider.inference.batch import responder
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.batch.tasks import Answer, Task
from tests.inference.batch.responding import ALONE
from tests.refusals import refusal
from tests.support.chat_families import FAMILIES, REWRITING, byte_fallback, cleaning, tokenizer_of
from tests.tiny import save_target

BUDGET = 150
PROMPTS = [["one?"], ["two?", "another?"], ["cut?"], ["nothing?"], ["talk?", "nothing?"], ["long talk?", "cut?"]]
Said = tuple[tuple[int, ...], tuple[int, ...]]  # what was read, what was written


class Scripted:
    """Continues a prompt by what its last question asks for, spelt in single bytes at first, and keeps what it said."""

    def __init__(self, tokenizer: Any, family: Any) -> None:
        self.tokenizer, self.family, self.said = tokenizer, family, list[Said]()

    def answer(self, prompts: list[list[int]], draws: list[torch.Tensor]) -> list[Answer]:
        return [self._answer(prompt, len(numbers)) for prompt, numbers in zip(prompts, draws, strict=True)]

    def _answer(self, prompt: list[int], budget: int) -> Answer:
        text = self.tokenizer.decode(prompt)
        asked = max(("one?", "two?", "another?", "cut?", "nothing?", "talk?"), key=text.rfind)
        first, second, end = self.family.first, self.family.second, self.family.end
        said = {"cut?": first.partition(".")[0] + "x" * 200, "nothing?": "", "another?": second}.get(asked, first)
        tokens = [*self.tokenizer(said)["input_ids"], *self.tokenizer(end)["input_ids"]]
        if asked in ("two?", "another?"):  # in other tokens than those of its text
            pieces = re.split("(Seven|prime)", said)
            tokens = [token for piece in pieces for token in self._spelt(piece)] + tokens[-1:]
        if asked != "nothing?":
            self.said.append((tuple(prompt), tuple(tokens[:budget])))
        return Answer(tuple(tokens[:budget]), len(tokens) <= budget)

    def _spelt(self, piece: str) -> list[int]:
        letters = piece if piece in ("Seven", "prime") else [piece]
        return [token for letter in letters for token in self.tokenizer(letter)["input_ids"]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("weights"), vocab_size=300, max_position_embeddings=2048)


@pytest.fixture
def answer(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Has the scripted target of a family answer: its tokenizer, the settings that read the answers, and the script."""
    monkeypatch.setattr(responses_module, "join_processes", lambda: ALONE)

    def run(name: str, prompts: list[list[str]] = PROMPTS, **options: Any) -> tuple[Any, DataConfig, Scripted]:
        family, target = FAMILIES[name], shutil.copytree(weights, tmp_path / name)
        tokenizer_of(family).save_pretrained(target)
        tokenizer = load_tokenizer(str(target))
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in prompts))
        script = Scripted(tokenizer, family)
        monkeypatch.setattr(responder, "load_target", lambda *_: None)
        monkeypatch.setattr(responder, "Generator", lambda *_, **__: script)
        asked = DataConfig(source="local", path=str(tmp_path / "prompts.jsonl"), heldout_fraction=0.0)
        out_dir, template = str(tmp_path / "out"), options.pop("template", "tokenizer")
        settings = {"max_new_tokens": BUDGET, "batch_size": 2, **options}
        asked = DataConfig(**{**vars(asked), "template": template})
        generate_responses(GenerateConfig(target=str(target), data=asked, out_dir=out_dir, **settings))
        data = DataConfig(source="local", path=f"{out_dir}/responses-*.jsonl", heldout_fraction=0.0, template=template,
                          cache_dir=str(tmp_path / "rows"))  # fmt: skip
        return tokenizer, data, script

    return run


def learned(data: DataConfig, tokenizer: Any) -> list[Said]:
    """For every supervised span of the rows that are trained on: the tokens before it in its document, and its own."""
    found = []
    for row in load_rows(data, tokenizer, 2048, "train"):
        for number in range(int(row["documents"].max()) + 1):
            mine = row["documents"] == number
            ids, labels = row["input_ids"][mine].tolist(), row["labels"][mine]
            known = [False, *(labels != IGNORE).tolist()]
            assert all(ids[i + 1] == labels[i] for i in range(len(ids) - 1) if known[i + 1])
            begins = [i for i in range(1, len(ids)) if known[i] and not known[i - 1]]
            for begin in begins:
                end = next((i for i in range(begin, len(ids)) if not known[i]), len(ids))
                found.append((tuple(ids[:begin]), tuple(ids[begin:end])))
    return sorted(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_trained_on_is_what_the_target_read_and_wrote(answer: Any, name: str, capsys: Any) -> None:
    """One turn, two, an answer cut by the budget, one that ends at once; also as a second turn."""
    tokenizer, data, script = answer(name)
    assert learned(data, tokenizer) == sorted(script.said)
    ends = [tokens[-1] == tokenizer.eos_token_id for _, tokens in script.said]
    assert (len(ends), ends.count(False)) == (7, 2)  # two are cut; where none was said nothing is learned
    told = json.loads((Path(data.path[0]).parent / "summary.json").read_text())
    assert told["skipped_by_reason"] == {"empty": 1}
    said = re.search(r"text_differs=(\d)/(\d): .*token \d+ of \d+: the target has \[.*\], ", capsys.readouterr().out)
    assert said  # of the spelt answer at the latest
    talks = [record for record in read_records(data, "train") if "messages" in record]
    documents = [len(record["written"].documents) for record in talks if len(record["messages"]) == 4]
    assert set(documents) == {2 if name in REWRITING else 1}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt_oss"])
def test_so_is_what_is_counted(answer: Any, name: str) -> None:
    """In an n-gram table; of another tokenizer's the text is."""
    _, data, script = answer(name)
    encoder = open_encoder(str(Path(data.path[0]).parents[1] / name))
    counted = list(passages(read_records(data, "train"), "assistant", encoder))
    assert sorted(one.ids for one in counted) == sorted(tokens for _, tokens in script.said)
    assert not any(one.ends or one.text for one in counted)
    few = {
        piece: token for piece, token in encoder.pieces.items() if token < 9
    }  # a target may have tokens that its tokenizer has not
    for other in (encoder._replace(digest="of another"), encoder._replace(pieces=few)):
        others = passages(read_records(data, "train"), "assistant", other)
        assert all(one.text and not one.ids for one in others)


def _another_turns(task: Task, answer: Answer) -> None:
    keep(task, answer)
    read = task.documents[-1]
    begin, end = read.answers[-1]
    task.documents[-1] = TokenisedText([*read.ids[:begin], *([5] * (end - begin))], read.answers)


def _ended(task: Task, answer: Answer) -> None:
    keep(task, answer)
    if not answer.ended:
        read = task.documents[-1]
        begin, end = read.answers[-1]
        task.documents[-1] = TokenisedText([*read.ids, 262], [*read.answers[:-1], (begin, end + 1)])


def _forgotten(task: Task, answer: Answer) -> None:
    keep(task, answer)
    task.documents[-1] = TokenisedText(task.documents[-1].ids, task.documents[-1].answers[-1:])


keep = Task.keep


@pytest.mark.parametrize("fault", [_another_turns, _ended, _forgotten])
def test_planted_faults_are_caught(answer: Any, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(Task, "keep", fault)
    tokenizer, data, script = answer("qwen2")
    try:
        found = learned(data, tokenizer)
    except UserError:  # it lacks the tokens of an answer
        found = []
    assert found != sorted(script.said)


def test_text_alone_would_not_do(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the script's answers are a test: without their tokens hardly any is learned as it was written."""
    tokenizer, data, script = answer("qwen3", [["one?"], ["two?"], ["cut?"]])
    monkeypatch.setattr(documents, "_recorded_documents", lambda *_: [])
    assert len({*learned(data, tokenizer)} & {*script.said}) == 1


def test_answers_of_another_tokenizer_or_template_are_tokenised_anew_and_it_is_said(answer: Any, capsys: Any) -> None:
    _, data, script = answer("qwen2", [["one?"], ["two?"]])
    errors.warn_once.cache_clear()
    other = tokenizer_of(FAMILIES["qwen2"])
    other.add_tokens(["more"])
    (ends,) = {tokens[-1] for _, tokens in script.said}
    found = learned(data, other)
    assert "another tokenizer or chat template" in capsys.readouterr().err
    assert found != sorted(script.said)
    assert all(tokens[-1] == ends for _, tokens in found)


def test_an_edited_text_is_what_is_learned_and_it_is_said(answer: Any, capsys: Any) -> None:
    tokenizer, data, _ = answer("qwen2", [["one?"], ["two?", "another?"]])
    errors.warn_once.cache_clear()
    (file,) = Path(data.path[0]).parent.glob("responses-*.jsonl")
    file.write_text(file.read_text().replace("Seven, of course.", "Seven."))
    found = [tokenizer.decode(list(ids)) for _, ids in learned(data, tokenizer)]
    assert {text for text in found if "Seven" in text} == {"Seven.<|im_end|>"}
    said = capsys.readouterr().err
    assert said.count("is not the one that was written") == 1
    assert file.name in said


@pytest.mark.parametrize(
    "change",
    [
        {"ids": [1, "x"]},
        {"ids": [1, -2]},
        {"answers": [[0, 2]]},
        {"answers": [[1, 9999]]},
        {"answers": []},
        {"ids": []},
    ],
    ids=str,
)
def test_damaged_tokens_are_named(answer: Any, change: dict[str, Any]) -> None:
    tokenizer, data, _ = answer("qwen2", [["one?"]])
    (file,) = Path(data.path[0]).parent.glob("responses-*.jsonl")
    raw = json.loads(file.read_text())
    raw["written"]["documents"][0] |= change
    file.write_text(json.dumps(raw) + "\n")
    refusal(r"responses-00000\.jsonl:1: written", load_rows, data, tokenizer, 64, "train")


def test_texts_are_continued_by_tokens_too(answer: Any, tmp_path: Path) -> None:
    """With the prompt before them, which is not learned: nobody said it."""
    tokenizer, data, script = answer("qwen2", [["one?"]])
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Two? one? two?"}) + "\n")
    asked = DataConfig(source="local", path=str(tmp_path / "prompts.jsonl"), heldout_fraction=0.0)
    out = str(tmp_path / "texts")
    script.said.clear()
    generate_responses(GenerateConfig(target=str(tmp_path / "qwen2"), data=asked, out_dir=out, max_new_tokens=BUDGET))
    data = DataConfig(**{**vars(data), "path": (f"{out}/responses-*.jsonl",)})
    assert learned(data, tokenizer) == sorted(script.said)
    assert script.said[0][0] == tuple(tokenizer("Two? one? two?")["input_ids"])


@pytest.fixture(scope="module")
def loaded(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    target = shutil.copytree(weights, tmp_path_factory.mktemp("loaded") / "qwen2")
    tokenizer_of(FAMILIES["qwen2"]).save_pretrained(target)
    return outrider.load(str(target), device="cpu")


def talk_of(text: str, **more: Any) -> list[dict[str, Any]]:
    user = {"role": "user", "content": "one?"}
    return [user, {"role": "assistant", "content": text, **more}, user]


def test_a_later_turn_is_asked_after_the_tokens_of_the_earlier_ones(loaded: Any) -> None:
    """As far as the template gives their text: also of a cut answer, and after what it gives otherwise."""
    tokenizer = loaded.tokenizer
    spelt = [tokenizer(letter)["input_ids"][0] for letter in "Seven"]
    end = tokenizer("<|im_end|>")["input_ids"]
    before, rest = (
        loaded.ids(talk_of("")[:1]),
        tokenizer("\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"),
    )
    for ids, then in (([*spelt, *end], []), (spelt, end)):
        assert loaded.ids(talk_of("Seven", ids=ids)) == [*before, *ids, *then, *rest["input_ids"]]
    assert loaded.ids(talk_of("Eight", ids=spelt)) == loaded.ids(talk_of("Eight"))  # not what it says any more
    twice = [*talk_of("Seven", ids=[*spelt, *end])[:2], *talk_of("Seven", ids=[*spelt, *end])]
    assert loaded.ids(twice)[-len(rest["input_ids"]) - 6 :][:6] == [*spelt, *end]
    mixed = [*talk_of("other", ids=spelt)[:2], *talk_of("Seven", ids=[*spelt, *end])]
    assert loaded.ids(mixed)[-len(rest["input_ids"]) - 6 :][:6] == [*spelt, *end]
    for odd in ([3, 9999], ["a"], 5):
        refusal("ids", loaded.ids, talk_of("Seven", ids=odd))


@pytest.mark.parametrize(
    "make", [byte_fallback, cleaning, lambda: tokenizer_of(FAMILIES["qwen2"])], ids=["b", "c", "q"]
)
def test_generated_text_is_the_tokenizers_decoding(weights: Path, tmp_path: Path, make: Any) -> None:
    target = shutil.copytree(weights, tmp_path / "target")
    make().save_pretrained(target)
    model = outrider.load(str(target), device="cpu")
    for seed in range(4):
        pieces = [*model.stream("Hello there", max_new_tokens=40, do_sample=True, temperature=3.0, seed=seed)]
        ids = list(model.last.ids)
        assert "".join(pieces) == model.tokenizer.decode(ids, skip_special_tokens=True)
        assert all(pieces)


ODD = "a lone \ud800 surrogate"


def test_what_is_no_text_is_refused(loaded: Any, weights: Path, tmp_path: Path) -> None:
    """By the Python API and the audit, as a prompt, a message, an answer and a system's."""
    question = {"role": "user", "content": "?"}
    odd: list[Any] = [ODD, [{**question, "content": ODD}], [{"role": "system", "content": ODD}, question]]
    for prompt in odd:
        refusal("surrogate", loaded.generate, prompt)
    target, file = loaded.setup.target, tmp_path / "answers.jsonl"
    for key in ("prompt", "text"):
        file.write_text(json.dumps({"prompt": "a", "text": "b", key: ODD}) + "\n")
        refusal(r"answers\.jsonl:1: .*surrogate", read_answers, str(file), target)

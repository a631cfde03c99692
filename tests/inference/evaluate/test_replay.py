"""Replay against the live target, what is read from recordings, and the command."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sentencepiece import SentencePieceTrainer

from outrider.base.streams import Streams
from outrider.commands import config_for
from outrider.data_prep.text.chat import VICUNA_SYSTEM
from outrider.data_prep.text.prompts import Prompt
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.open_target import load_tokenizer
from outrider.draft_models.targets.vocabulary import vocabulary_digest
from outrider.inference.core.decode import speculative
from outrider.inference.loading.drafters import new_drafter
from outrider.inference.measure import replay as replaying
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, NgramConfig
from tests.inference.evaluate.evaluating import refused
from tests.refusals import refusal
from tests.tiny import open_stack, random_prompt, reference_generate, save_target

METHODS = {
    "puct": MethodConfig(source="ngrams", ngrams=NgramConfig(search="puct", iterations=40)),
    "best_first": MethodConfig(source="ngrams", ngrams=NgramConfig(depth=6)),
    "mixed": MethodConfig(source="ngrams", ngrams=NgramConfig(evidence="mixed", depth=12)),
    "prompt_lookup": MethodConfig(source="prompt_lookup"),
}


def outcome(rounds: list) -> list[tuple]:
    return [(r.tokens, r.drafted, r.accepted) for r in rounds]


@pytest.mark.parametrize("method", METHODS)
def test_rounds_equal_a_live_targets(tmp_path: Path, method: str) -> None:
    model, stack = open_stack(save_target(tmp_path, kv_heads=2))
    prompt = random_prompt(14) * 2
    table = TrigramTable.from_documents([reference_generate(model, prompt, 40), random_prompt(50)], [2, 3, 4], 256, "t")
    drafters = {"ngrams": table}
    own = Streams(3, "1").within("m")
    for length, ends in ((60, ()), (60, "inside"), (17, ())):
        text = reference_generate(model, prompt, length)
        eos = {text[length // 2]} if ends else set()
        live = list(
            speculative(stack, new_drafter(METHODS[method], drafters, own), prompt, max_new_tokens=length, eos=eos)
        )
        answer = [token for r in live for token in r.tokens]
        recorded = replaying.replay(
            new_drafter(METHODS[method], drafters, own), prompt, answer, max_new_tokens=length, eos=eos
        )
        assert outcome(list(recorded)) == outcome(live)
        assert len(answer) < length if ends else answer == text
        if ends:  # the command: a draft does not see that the recording ends before the budget does
            turn = replaying.RecordedTurn("1", "c", tuple(prompt), tuple(answer))
            config = SimpleNamespace(max_new_tokens=length, seed=3)
            (found,) = replaying.replay_turns("m", METHODS[method], drafters, [turn], config)
            assert outcome(found.rounds) == outcome(live[1:])
    assert any(r.accepted > 1 for r in live) or method == "prompt_lookup"


def test_a_recording_longer_than_the_budget_is_cut() -> None:
    drafter = new_drafter(METHODS["prompt_lookup"], {}, Streams(0))
    rounds = list(replaying.replay(drafter, [1, 2], [3, 4, 5, 6, 7], max_new_tokens=3))
    assert [t for r in rounds for t in r.tokens] == [3, 4, 5]
    refusal("empty recorded answer", next, replaying.replay(drafter, [1], [], max_new_tokens=3))


def asked(name: str, *turns: str) -> Prompt:
    return Prompt(name, "c", turns, chat=True)


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_a_conversation_is_the_later_turns_context() -> None:
    vocabulary = replaying.Vocabulary(characters, 1, 2, "d")
    first, second = replaying.recordings([asked("7", "q", "r")], {"7": ("a", "b")}, vocabulary)
    assert first.prompt == (1, *characters(f"{VICUNA_SYSTEM} USER: q ASSISTANT:"))
    assert first.answer == (*characters(" a"), 2)
    assert second.prompt == (*first.prompt, *first.answer, *characters("USER: r ASSISTANT:"))
    assert (second.answer, second.id, second.category) == ((*characters(" b"), 2), "7/turn2", "c")


def test_an_answer_whose_space_merges_is_taken_alone() -> None:
    def merging(text: str) -> list[int]:
        return characters(text.replace(": ", ""))

    (only,) = replaying.recordings([asked("7", "q")], {"7": ("a",)}, replaying.Vocabulary(merging, None, 2, "d"))
    assert only.answer == (*characters("a"), 2)
    assert only.id == "7"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A SentencePiece model, prompts, answers and a table."""
    folder = tmp_path_factory.mktemp("replay")
    texts = [
        "the cat sat on the mat and the dog sat on the log",
        "a question about the cat and the dog",
        "USER ASSISTANT",
    ]
    (folder / "text.txt").write_text("\n".join(texts * 5))
    SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "pieces"), vocab_size=60, minloglevel=9,
        byte_fallback=False, hard_vocab_limit=False,
    )  # fmt: skip
    questions = [{"question_id": i, "category": f"c{i % 2}", "turns": ["a question", "the log"]} for i in range(3)]
    answers = [{"question_id": i, "choices": [{"turns": texts[:2]}]} for i in range(3)]
    for name, records in (("questions", questions), ("answers", answers)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    vocabulary = replaying.load_vocabulary(str(folder / "pieces.model"))
    documents = [vocabulary.encode(text) for text in texts]
    size = max(map(max, documents)) + 1
    TrigramTable.from_documents(documents, [2, 3, 4], size, vocabulary.vocabulary_digest).save(folder / "table")
    TrigramTable.from_documents(documents, [2, 3, 4], size, "another").save(folder / "other_table")
    return {name: str(folder / name) for name in ("pieces.model", "questions.jsonl", "answers.jsonl", "table",
                                                  "other_table")}  # fmt: skip


def run(files: dict[str, str], out_dir: Path, *overrides: str) -> None:
    given = [f"transcripts={files['answers.jsonl']}", f"tokenizer={files['pieces.model']}",
             f"prompts={files['questions.jsonl']}", f"table={files['table']}", f"out_dir={out_dir}",
             *overrides]  # fmt: skip
    replaying.replay_answers(config_for("inference/replay.py", given))


def test_the_command(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    threads = torch.get_num_threads()
    try:
        methods = ["method=[aded,ngrams,prompt_lookup]", "+method@methods.best_first=aded"]
        methods += ["methods.best_first.ngrams.search=best_first", "methods.best_first.ngrams.depth=10"]
        run(files, tmp_path, *methods, f"threads={threads + 1}")
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'report.md'}"
    report = json.loads((tmp_path / "report.json").read_text())
    taus = {r["method"]: r["tau"] for r in report["reports"]}
    assert list(taus) == ["aded", "ngrams", "prompt_lookup", "best_first"]
    assert taus["prompt_lookup"] > 1
    assert taus["ngrams"] > 3  # the table holds the answers
    assert {r["turns"] for r in report["reports"]} == {6}
    assert set(report["reports"][0]["by_category"]) == {"c0", "c1"}
    assert (report["max_new_tokens"], report["table"]) == (128, files["table"])
    assert f"| ngrams | {taus['ngrams']:.3f} |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("overrides", "message"), [
    (["method=ngrams", "table={other_table}"], "built with another tokenizer"),
    (["method=ngrams", "table=nowhere"], "nowhere/table.safetensors: no readable n-gram table"),
    (["method=ngrams", "table=null"], "table: missing; give it as table=VALUE: an n-gram table directory (outrider b"),
    (["method=ngrams_recycled"], "methods.ngrams_recycled.ngrams.recycle=8: expected 0"),
    (["method=ngrams", "tokenizer=none.model"], "tokenizer=none.model: no usable tokenizer"),
    (["method=ngrams", "transcripts=none.jsonl"], "transcripts=none.jsonl: no such file"),
    (["method=eesd_fixed"], "methods.eesd_fixed='early_exit': expected a drafter of tokens"),
    (["method=prompt_lookup", "+drafters.small_lm=x"], "drafters.small_lm='x': expected null: no model runs"),
    (["method=ngrams", "target=replay"], "target"),
])  # fmt: skip
def test_bad_input(files: dict[str, str], tmp_path: Path, overrides: list[str], message: str) -> None:
    refusal(re.escape(message), run, files, tmp_path, *(override.format(**files) for override in overrides))


def test_transcripts_are_utf8_with_one_record_a_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    records = [{"question_id": i, "choices": [{"turns": ["é\u2028b\x85"]}]} for i in range(2)]
    lines = "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    path.write_bytes(lines.encode())
    assert replaying.read_transcripts(str(path)) == {"0": ("é\u2028b\x85",), "1": ("é\u2028b\x85",)}


def test_prompts_of_other_transcripts() -> None:
    read, vocabulary = replaying.recordings, replaying.Vocabulary(characters, None, 2, "d")
    refusal("prompt 8: no answer", read, [asked("8", "q")], {"7": ("a",)}, vocabulary)
    for answers in ((), ("a",), ("a", "b", "c")):
        words = f"prompt 7: 2 turns, but {len(answers)} answers"
        refusal(words, read, [asked("7", "q", "r")], {"7": answers}, vocabulary)


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    path = str(save_target(tmp_path))
    vocabulary, tokenizer = replaying.load_vocabulary(path), load_tokenizer(path)
    assert vocabulary.encode("ab c") == tokenizer("ab c", add_special_tokens=False)["input_ids"]
    assert vocabulary.eos == tokenizer.eos_token_id
    assert vocabulary.vocabulary_digest == vocabulary_digest(tokenizer.get_vocab())


def test_a_live_target_refuses_another_tokenizers_table(files: dict[str, str], tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    methods = {"m": MethodConfig("ngrams")}
    config = EvaluateConfig(target=str(target), table=files["table"], methods=methods, out_dir=str(tmp_path / "out"))
    refused(config, "built with another tokenizer")

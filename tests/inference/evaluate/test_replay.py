"""Replay against the live target, what is read from recordings, and the command."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceTrainer
from transformers import AutoModelForCausalLM

from outrider.base.settings import construct
from outrider.base.streams import Streams
from outrider.commands import config_for
from outrider.data_prep.text.chat import VICUNA_SYSTEM
from outrider.data_prep.text.prompts import Prompt
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.open_target import load_tokenizer
from outrider.draft_models.targets.vocabulary import vocabulary_digest
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.core.decode import speculative
from outrider.inference.core.rounds import collect
from outrider.inference.evaluate import replaying as replaying_command
from outrider.inference.evaluate.replaying import replay_answers
from outrider.inference.loading.drafters import new_drafter
from outrider.inference.measure import recordings as reading
from outrider.inference.measure import replay as replaying
from outrider.inference.measure.recordings import (
    RecordedTurn,
    Vocabulary,
    load_vocabulary,
    read_responses,
    read_transcripts,
    recordings,
)
from outrider.inference.measure.server_costs import WIDTHS, ServerCosts
from outrider.inference.measure.statistics import decode_statistics
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, NgramConfig
from tests.faults import plant
from tests.inference.evaluate.evaluating import refused
from tests.inference.evaluate.server_stand_in import Plan, running
from tests.refusals import refusal
from tests.tiny import byte_tokenizer, open_stack, random_prompt, reference_generate, save_target

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
            turn = RecordedTurn("1", "c", tuple(prompt), tuple(answer))
            config = SimpleNamespace(max_new_tokens=length, seed=3, draft_tokens=())
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
    vocabulary = Vocabulary(characters, 1, 2, "d")
    first, second = recordings([asked("7", "q", "r")], {"7": ("a", "b")}, vocabulary)
    assert first.prompt == (1, *characters(f"{VICUNA_SYSTEM} USER: q ASSISTANT:"))
    assert first.answer == (*characters(" a"), 2)
    assert second.prompt == (*first.prompt, *first.answer, *characters("USER: r ASSISTANT:"))
    assert (second.answer, second.id, second.category) == ((*characters(" b"), 2), "7/turn2", "c")


def test_an_answer_whose_space_merges_is_taken_alone() -> None:
    def merging(text: str) -> list[int]:
        return characters(text.replace(": ", ""))

    (only,) = recordings([asked("7", "q")], {"7": ("a",)}, Vocabulary(merging, None, 2, "d"))
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
    questions = [
        {"question_id": i, "category": ["3", "qa] b"][i % 2], "turns": ["a question", "the log"]} for i in range(3)
    ]
    answers = [{"question_id": i, "choices": [{"turns": texts[:2]}]} for i in range(3)]
    for name, records in (("questions", questions), ("answers", answers)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    vocabulary = load_vocabulary(str(folder / "pieces.model"))
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
    replay_answers(config_for("inference/replay.py", given))


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
    by_category = [part["tau"] for part in report["reports"][1]["by_category"].values()]
    assert set(report["reports"][1]["by_category"]) == {"3", "qa] b"}
    assert (report["max_new_tokens"], report["table"]) == (128, files["table"])
    page = (tmp_path / "report.md").read_text()
    assert f"| ngrams | {taus['ngrams']:.3f} |" in page
    assert " | ".join(f"{tau:.2f}" for tau in by_category) in page


@pytest.mark.parametrize(("overrides", "message"), [
    (["method=ngrams", "table={other_table}"], "built with another tokenizer"),
    (["method=ngrams", "table=nowhere"], "nowhere/table.safetensors: no readable n-gram table"),
    (["method=ngrams", "table=null"], "table: missing; give it as table=VALUE: an n-gram table directory (outrider b"),
    (["method=ngrams_recycled"], "methods.ngrams_recycled.ngrams.recycle=8: expected 0"),
    (["method=ngrams", "tokenizer=none.model"], "tokenizer=none.model: no usable tokenizer"),
    (["method=ngrams", "transcripts=none.jsonl"], "transcripts=none.jsonl: no such file"),
    (["method=eesd_fixed"], "methods.eesd_fixed='early_exit': expected a drafter of tokens"),
    (["method=prompt_lookup", "+drafters.eagle3=x"], "drafters.eagle3='x': expected null: no layers of a target run"),
    (["method=ngrams", "target=replay"], "target"),
])  # fmt: skip
def test_bad_input(files: dict[str, str], tmp_path: Path, overrides: list[str], message: str) -> None:
    refusal(re.escape(message), run, files, tmp_path, *(override.format(**files) for override in overrides))


def test_only_what_an_engine_drafts_is_replayed_as_there(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree keeps its own τ, and has no speed-up to expect."""
    costs = ServerCosts((0.04,), dict.fromkeys(WIDTHS, (0.05,)))
    monkeypatch.setattr(replaying_command, "time_server", lambda *_: costs)
    words = ["method=[aded,ngrams]", "methods.aded.ngrams.search=best_first"]
    run(files, tmp_path / "here", *words)
    run(files, tmp_path / "there", *words, "draft_tokens=[2]", "server=http://localhost:1")
    here, there = (json.loads((tmp_path / name / "report.json").read_text())["reports"] for name in ("here", "there"))
    assert here[0]["tau"] == there[0]["tau"]
    assert ["expected" in row and row["expected"] is not None for row in there] == [False, True]
    assert "speed-up there" in (tmp_path / "there/report.md").read_text()


def test_transcripts_are_utf8_with_one_record_a_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    records = [{"question_id": i, "choices": [{"turns": ["é\u2028b\x85"]}]} for i in range(2)]
    lines = "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    path.write_bytes(lines.encode())
    assert read_transcripts(str(path)) == {"0": ("é\u2028b\x85",), "1": ("é\u2028b\x85",)}


def test_prompts_of_other_transcripts() -> None:
    read, vocabulary = recordings, Vocabulary(characters, None, 2, "d")
    refusal("prompt 8: no answer", read, [asked("8", "q")], {"7": ("a",)}, vocabulary)
    for answers in ((), ("a",), ("a", "b", "c")):
        words = f"prompt 7: 2 turns, but {len(answers)} answers"
        refusal(words, read, [asked("7", "q", "r")], {"7": answers}, vocabulary)


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    path = str(save_target(tmp_path))
    vocabulary, tokenizer = load_vocabulary(path), load_tokenizer(path)
    assert vocabulary.encode("ab c") == tokenizer("ab c", add_special_tokens=False)["input_ids"]
    assert vocabulary.eos == tokenizer.eos_token_id
    assert vocabulary.vocabulary_digest == vocabulary_digest(tokenizer.get_vocab())


def test_a_live_target_refuses_another_tokenizers_table(files: dict[str, str], tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    methods = {"m": MethodConfig("ngrams")}
    config = EvaluateConfig(target=str(target), table=files["table"], methods=methods, out_dir=str(tmp_path / "out"))
    refused(config, "built with another tokenizer")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its greedy and its sampled answers, of which some end and some are cut, and a small LM like it."""
    folder = tmp_path_factory.mktemp("answered")
    target = save_target(folder / "target", kv_heads=2)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(90, 100)]}))
    (folder / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{i} the fox {i * 7919} jumps"}) for i in range(9))
    )
    data = DataConfig(source="local", path=str(folder / "text.jsonl"), layout="text", heldout_fraction=0)
    for temperature, name in enumerate(("greedy", "sampled")):
        generate_responses(GenerateConfig(
            target=str(target), data=data, out_dir=str(folder / name), temperature=float(temperature), prefix_tokens=8,
            max_new_tokens=20, batch_size=4, shard_size=4,
        ))  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            parameter.add_(0.02 * parameter.std() * noise)
    model.save_pretrained(folder / "small")
    byte_tokenizer().save_pretrained(folder / "small")
    for file in target.glob("*.safetensors"):
        file.rename(folder / "weights")
    return folder


def replay_responses(folder: Path, out_dir: Path, answers: str = "greedy", *more: str) -> dict[str, Any]:
    """The report of the command on answers of the target in `folder`."""
    words = [f"transcripts={folder / answers}", f"tokenizer={folder / 'target'}", f"out_dir={out_dir}", *more]
    replay_answers(config_for("inference/replay.py", words))
    report: dict[str, Any] = json.loads((out_dir / "report.json").read_text())
    return report


def test_files_of_answers_give_what_decoding_comes_to(
    answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens and rounds of a table-less drafter and of a small LM, with answers that end and that are cut."""
    words = ["method=[prompt_lookup,small_lm/fixed]", f"small_lm={answered / 'small'}", "max_new_tokens=20"]
    found = replay_responses(answered, tmp_path / "run", "greedy", *words)["reports"]
    turns = read_responses(str(answered / "greedy"), load_vocabulary(str(answered / "target")))
    assert {turn.ended for turn in turns} == {True, False}
    live = Path(shutil.copytree(answered / "target", tmp_path / "target"))
    shutil.copy(answered / "weights", live / "model.safetensors")
    _, stack = open_stack(live)
    lm = load_small_lm(str(answered / "small"), byte_tokenizer(), dtype=torch.float32)
    methods = {report["method"]: construct(MethodConfig, report["settings"]) for report in found}
    for report in found:
        generations = []
        for turn in turns:
            drafter = new_drafter(methods[report["method"]], {"small_lm": lm}, Streams(0, turn.id))
            rounds = speculative(stack, drafter, turn.prompt, max_new_tokens=20, eos={*range(90, 100)})
            generations.append(collect(rounds))
        assert [g.tokens for g in generations] == [turn.answer for turn in turns]
        assert report["tau"] == decode_statistics(generations).tau
        assert report["turns"] == report["greedy_turns"] == len(turns)
    assert found[1]["tau"] > 1.5
    plant(monkeypatch, reading, "_read_turns", "ids[begin:end]", "ids[begin:end - 1]")
    assert replay_responses(answered, tmp_path / "cut", "greedy", *words)["reports"][1]["tau"] != found[1]["tau"]


def test_what_a_drafted_token_takes_in_an_engine_counts_for_the_small_lm_alone(
    answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = ServerCosts((0.04,), dict.fromkeys(WIDTHS, (0.05,)))
    monkeypatch.setattr(replaying_command, "measure_server", lambda server, tokens: costs)
    words = ["method=[prompt_lookup,small_lm/fixed]", f"small_lm={answered / 'small'}", "draft_tokens=[3]"]
    expected = {}
    with running(Plan(str, {})) as target, running(Plan(str, {})) as drafter:
        for seconds in (0.0, 9.0):
            monkeypatch.setattr(
                replaying_command, "measure_drafter",
                lambda server, tokens, seconds=seconds: (seconds,) * (server.setting == f"draft_server={drafter}"),
            )  # fmt: skip
            urls = [f"server={target}", f"draft_server={drafter}"]
            rows = replay_responses(answered, tmp_path / str(seconds), "greedy", *words, *urls)["reports"]
            expected[seconds] = [row["expected"]["median"] for row in rows]
    lookup, small = zip(*expected.values(), strict=True)
    assert lookup[0] == pytest.approx(lookup[1], rel=0.05)
    assert small[0] > 1 > 0.1 > small[1]
    refusal("draft_server=.*: expected null without server=URL", replay_responses, answered, tmp_path, "greedy",
            *words, "draft_server=http://localhost:1")  # fmt: skip


def test_sizes_that_need_measured_costs_are_refused(answered: Path, tmp_path: Path) -> None:
    words = ["method=small_lm/survival", f"small_lm={answered / 'small'}"]
    refusal("methods.small_lm_survival='small_lm': expected sizes and a stop rule that need no measured costs",
            replay_responses, answered, tmp_path, "greedy", *words)  # fmt: skip


def test_sampled_answers_are_told(answered: Path, tmp_path: Path) -> None:
    report = replay_responses(answered, tmp_path, "sampled", "num_prompts=4")["reports"][0]
    assert (report["turns"], report["greedy_turns"]) == (4, 0)
    assert "teacher-forced, as 4 turns are not known to be greedy" in (tmp_path / "report.md").read_text()
    flagged = tmp_path / "flagged.jsonl"
    records = [json.loads(line) for line in (answered / "sampled/responses-00000.jsonl").read_text().splitlines()]
    flagged.write_text("".join(json.dumps({**record, "greedy": i > 0}) + "\n" for i, record in enumerate(records)))
    vocabulary = load_vocabulary(str(answered / "target"))
    assert [turn.greedy for turn in read_responses(str(flagged), vocabulary)] == [i > 0 for i in range(len(records))]


def test_answers_without_token_ids_or_of_another_tokenizer_are_refused(
    answered: Path, files: dict[str, str], tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"id": "7", "text": "no ids"}) + "\n")
    vocabulary = load_vocabulary(str(answered / "target"))
    refusal(r"text\.jsonl:1: no token ids of the target in it; give prompts=", read_responses, str(text), vocabulary)
    other = load_vocabulary(files["pieces.model"])
    refusal("its tokens are of another tokenizer", read_responses, str(answered / "greedy"), other)
    greedy = next((answered / "greedy").glob("responses-*.jsonl"))
    refusal("not an answer record", read_transcripts, str(greedy))

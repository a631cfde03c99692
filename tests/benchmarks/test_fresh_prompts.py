"""Prompts are left out for what was seen, and chosen by their places alone; the record is of those that were fixed."""

import json
from pathlib import Path

import pytest

LONG = " ".join(f"w{place}" for place in range(15))
FILES = {
    "arena_hard": [f"chat {n}" for n in range(8)] + ["x " * 1001, "Seen, BEFORE!", f"say: {LONG}", "chat 7"],
    "humaneval": [f"def f{n}():" for n in range(12)],
    "seen": ["seen before", LONG],
}


def test_what_was_seen_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fresh_prompts

    for name, texts in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    kinds = {"chat": ("arena_hard.jsonl", ""), "code": ("humaneval.jsonl", "")}
    for name, value in {"KINDS": kinds, "SOURCES": {}, "EACH": 3, "MANIFEST": tmp_path / "manifest.json"}.items():
        monkeypatch.setattr(fresh_prompts, name, value)

    def run(*words: str) -> None:
        seen = ["--seen", f"{tmp_path}/seen.jsonl", f"{tmp_path}/humaneval.jsonl=2,4"]
        monkeypatch.setattr("sys.argv", ["fresh_prompts.py", "--sources", str(tmp_path), *seen, *words])
        fresh_prompts.main()

    run("--out", str(tmp_path / "out"))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    chat, code = (manifest["kinds"][kind] for kind in kinds)
    assert chat["texts"] == {"left": 8, "too long": 1, "seen": 3}
    assert chat["ids"] == ["arena_hard/0", "arena_hard/2", "arena_hard/5"]
    assert code["ids"] == ["humaneval/4", "humaneval/7", "humaneval/10"]  # of 4, 5, 7, 8, 10 and 11
    assert json.loads((tmp_path / "out/code.jsonl").read_text().splitlines()[0])["prompt"] == "def f4():"
    run()
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "rule": "another"}))
    with pytest.raises(SystemExit):
        run()


def test_the_record_is_of_the_prompts_that_were_fixed() -> None:
    from figures import RESULTS
    from record_raw import raw_file, read_raw

    kinds = json.loads((RESULTS / "fresh_prompts.json").read_text())["kinds"]
    fixed = {f"{kind}/{name}" for kind, own in kinds.items() for name in own["ids"]}
    assert len(fixed) == sum(len(set(own["sha256"])) for own in kinds.values()) == 210
    for raw in read_raw(raw_file(RESULTS / "fresh_cpu.json")).values():
        assert {one["id"] for one in raw["prompts"]} <= fixed

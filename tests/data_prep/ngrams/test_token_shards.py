"""Shards of token ids: what they hold, documents over several of them, and processes that die."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from outrider.base.errors import UserError
from outrider.data_prep.ngrams.token_shards import Passage, Shards, passages, read_shard, tokenise, whole_documents
from outrider.draft_models.targets.encoder import Encoder, open_encoder

ROOT = Path(__file__).parents[3]


def test_shards_hold_what_was_tokenised(tmp_path: Path, model: str) -> None:
    encoder = open_encoder(model, None)
    assert isinstance(encoder.eos, int)
    texts = list(passages([{"id": "1", "text": "hello there"}], "all"))
    shards: Shards = tokenise([*texts, Passage("you", ends=False)], model, None, encoder, tmp_path, 1)
    ids, lengths = read_shard(shards.paths[0])
    first, second = encoder.encode(["hello there", "you"])
    assert ids.tolist() == [*first, encoder.eos, *second]
    assert lengths.tolist() == [len(first) + 1, len(second)]
    assert (shards.tokens, shards.documents) == (len(ids), 2)
    ended = tokenise([*texts, Passage("you", ends=True)], model, None, encoder, tmp_path, 1)
    assert read_shard(ended.paths[0])[0].tolist() == [*first, encoder.eos, *second, encoder.eos]
    other = encoder._replace(encode=lambda batch: [[7] for _ in batch], digest="of another tokenizer")
    again = tokenise([*texts, Passage("you", ends=True)], model, None, other, tmp_path, 1)
    assert read_shard(again.paths[0])[0].tolist() == [7, encoder.eos, 7, encoder.eos]
    assert len({shards.digest, ended.digest, again.digest}) == 3
    assert set(tmp_path.iterdir()) == set(again.paths)  # what no longer counts is gone


def test_a_call_of_tools_without_a_text_is_no_document() -> None:
    roles = {"user": "q", "assistant": "", "tool": "r"}
    talk = [{"role": role, "content": text} for role, text in roles.items()] + [{"role": "assistant", "content": "a"}]
    for text, expected in (("assistant", ["a"]), ("all", ["q", "r", "a"])):
        assert [one.text for one in passages([{"id": "1", "messages": talk}], text)] == expected


def test_answers_in_tokens_are_kept_as_they_are(tmp_path: Path) -> None:
    """Without an end that was not said; other tokens are another corpus."""
    encoder = Encoder(lambda batch: [[1] * len(text) for text in batch], {str(i): i for i in range(9)}, 8, "")
    found = []
    for ids in ((3, 4, 8), (3, 4)):
        texts = [Passage("ab", ends=True), Passage("", ends=False, ids=ids), Passage("c", ends=False)]
        shards = tokenise(texts, "", None, encoder, tmp_path, 1)
        said, lengths = read_shard(shards.paths[0])
        assert said.tolist() == [1, 1, 8, *ids, 1]
        assert lengths.tolist() == [3, len(ids), 1]
        found.append(shards.digest)
    assert len({*found}) == 2


def test_ids_that_the_model_has_no_row_for_part_a_document(tmp_path: Path) -> None:
    """They are not counted, and no n-gram reaches over one, also where a document goes on."""
    encoder = Encoder(lambda batch: [[int(sign) for sign in text] for text in batch], {"last": 9}, None, "", rows=8)
    texts = [Passage("12983", False), Passage("94", False, continues=True), Passage("5", False, continues=True)]
    shards = tokenise(texts, "", None, encoder, tmp_path, 1)
    assert [document.tolist() for document in whole_documents(shards)] == [[1, 2], [], [3], [4, 5]]
    assert shards.digest != tokenise(texts, "", None, encoder._replace(rows=None), tmp_path, 1).digest


def test_ids_with_gaps_are_kept_whole(tmp_path: Path) -> None:
    """How many bytes an id takes is decided by the highest one, not by how many there are."""
    encoder = Encoder(lambda batch: [[2**16] for _ in batch], {"a": 0, "b": 2**16}, None, "")
    shards = tokenise([Passage("b", ends=False)], "", None, encoder, tmp_path, 1)
    assert read_shard(shards.paths[0])[0].tolist() == [2**16] == [encoder.vocabulary - 1]


def test_documents_over_several_shards_are_whole(tmp_path: Path) -> None:
    """Of no token, of one shard, over two and over many, in shards of three passages."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in range(60)]
    continues = [bool(number and rng.random() < 0.7) for number in range(60)]
    texts = [Passage(f"{number:010d}", False, goes_on) for number, goes_on in enumerate(continues)]
    encoder = Encoder(lambda batch: [parts[int(text)] for text in batch], {"last": 8}, None, "")
    shards = tokenise(texts, "", None, encoder, tmp_path, 1, shard=30)
    assert len(shards.paths) > 10 < sum(shards.continued) + 5
    documents: list[list[int]] = []
    for part, goes_on in zip(parts, continues, strict=True):
        if goes_on:
            documents[-1] = documents[-1] + part
        else:
            documents.append(part)
    assert [document.tolist() for document in whole_documents(shards)] == documents


@pytest.mark.slow
def test_a_killed_process_is_reported(tmp_path: Path, model: str) -> None:
    """One that cannot open the tokenizer ends as one that was killed."""
    texts = [Passage("you", ends=False)] * 2
    with pytest.raises(UserError, match="tokenizer=nowhere: a tokenising process was killed"):
        tokenise(texts, "nowhere", None, open_encoder(model, None), tmp_path, 2)


@pytest.mark.slow
def test_no_process_outlives_a_killed_build(tmp_path: Path, model: str) -> None:
    script = (
        "import sys, time, multiprocessing, pathlib\n"
        "from outrider.data_prep.ngrams import token_shards\n"
        "from outrider.draft_models.targets.encoder import open_encoder\n"
        "folder, model = sys.argv[1:]\n"
        "def texts():\n"
        "    for _ in range(9):\n"
        "        yield token_shards.Passage('you there', True)\n"
        "    print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "    time.sleep(60)\n"
        "token_shards.tokenise(texts(), model, None, open_encoder(model, None), pathlib.Path(folder), 2, 5)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script, tmp_path, model], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert run.stdout is not None
    children = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
    run.kill()
    run.wait()
    run.stdout.close()
    assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not left

"""A mix takes of each source its share of the supervised tokens, the same rows every time."""

import json
import pickle
from collections import Counter

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from conf import CONF_DIR, build, register
from data_prep.text.rows import interleave, load_rows, rows_taken
from data_prep.text.settings import DataConfig, MixPart
from data_prep.text.sources import read_records
from draft_models.losses import IGNORE
from outrider.errors import UserError
from train.settings.drafters import EesdConfig


@pytest.fixture
def mix(tmp_path):
    """A mix of conversations (few of whose tokens are supervised) and plain text (all of whose tokens are)."""

    def write(name, records):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / name)

    def talk(question, answer):
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    talks = write("talks.jsonl", [talk(f"Hello {i} " * 9, f"there {i}") for i in range(60)])
    texts = write("texts.jsonl", [{"text": f"def add(first, second): return {i}\n" * 3} for i in range(300)])

    def configure(weights=(1.0, 1.0), **values):
        parts = {
            "talks": MixPart(source="local", path=talks, weight=weights[0]),
            "texts": MixPart(source="local", path=texts, weight=weights[1]),
        }
        shared = {"heldout_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **values}
        return DataConfig(source="mix", mix=parts, **shared)

    return configure


def alone(config, name):
    """The source `name` of a mix by itself."""
    return next(part for part_name, _, part in config.parts() if part_name == name)


def supervised(rows):
    return sum(int((item["labels"] != IGNORE).sum()) for item in rows)


def contents(rows):
    return [tuple(item["input_ids"].tolist()) for item in rows]


def split_by_source(rows, config, tokenizer):
    """(rows of talks, rows of texts) among the rows of a mix."""
    talks = set(contents(load_rows(alone(config, "talks"), tokenizer, 128, "train")))
    return ([r for r in rows if tuple(r["input_ids"].tolist()) in talks],
            [r for r in rows if tuple(r["input_ids"].tolist()) not in talks])  # fmt: skip


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (0.2, 0.1)])
def test_sources_have_their_shares_of_the_supervised_tokens(mix, tokenizer, weights):
    config = mix(weights)
    rows = load_rows(config, tokenizer, 128, "train")
    talks, texts = split_by_source(rows, config, tokenizer)
    share = supervised(talks) / supervised(rows)
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.05)
    everything = [len(load_rows(alone(config, name), tokenizer, 128, "train")) for name in ("talks", "texts")]
    assert len(talks) == everything[0] or len(texts) == everything[1]  # as much as the shares allow
    assert max(Counter(contents(rows)).values()) == 1  # none twice
    assert rows.counts["rows"] == len(rows) == len(talks) + len(texts)
    assert rows.counts["supervised"] == pytest.approx(supervised(rows), rel=0.02)
    half = len(rows) // 2
    first = sum(tuple(r["input_ids"].tolist()) in set(contents(talks)) for r in [rows[i] for i in range(half)])
    assert first == pytest.approx(len(talks) / 2, abs=1)  # they take turns


def test_a_weight_of_zero_is_the_other_source_alone(mix, tokenizer):
    config = mix((0.0, 1.0))
    rows = load_rows(config, tokenizer, 128, "train")
    assert contents(rows) == contents(load_rows(alone(mix(), "texts"), tokenizer, 128, "train"))
    assert sum(1 for _ in read_records(config, "train")) == 300
    missing = MixPart(source="local", path="/nowhere", weight=0.0)
    config = DataConfig(**{**vars(config), "mix": {**config.mix, "talks": missing}})
    assert len(load_rows(config, tokenizer, 128, "train")) == len(rows)  # not even looked for


def test_the_rows_are_a_function_of_sources_and_weights(mix, tokenizer, tmp_path):
    rows = load_rows(mix(), tokenizer, 128, "train")
    again = load_rows(mix(cache_dir=str(tmp_path / "other")), tokenizer, 128, "train")
    assert contents(again) == contents(rows)
    assert again.key == rows.key
    assert contents(pickle.loads(pickle.dumps(rows))) == contents(rows)
    few = load_rows(mix(), tokenizer, 128, "train", max_rows=5)
    assert contents(few) == [contents(rows)[i * len(rows) // 5] for i in range(5)]
    keys = {load_rows(config, tokenizer, 128, "train").key for config in (mix((1.0, 2.0)), mix((2.0, 1.0)), mix())}
    assert len(keys) == 3
    with (tmp_path / "talks.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    assert load_rows(mix(), tokenizer, 128, "train").key not in keys


def test_sources_are_cached_for_themselves_and_counted_in_print(mix, tokenizer, capsys):
    load_rows(alone(mix(), "texts"), tokenizer, 128, "train")
    assert "tokenising into" in capsys.readouterr().out
    rows = load_rows(mix(), tokenizer, 128, "train")
    out = capsys.readouterr().out
    assert out.count("tokenising into") == 1
    (line,) = [line for line in out.splitlines() if line.startswith("data mix split=train")]
    assert f"rows={len(rows)}" in line
    assert "talks " in line
    assert "texts " in line


def test_each_source_has_its_own_heldout_records(mix, tokenizer):
    config = mix(heldout_fraction=0.3)
    for name in ("talks", "texts"):
        part = alone(config, name)
        train, heldout = ([r["id"] for r in read_records(part, split)] for split in ("train", "heldout"))
        assert train
        assert heldout
        assert not {*train} & {*heldout}
    mixed = [r["id"] for r in read_records(config, "heldout")]
    assert mixed == [r["id"] for name in ("talks", "texts") for r in read_records(alone(config, name), "heldout")]
    assert len(load_rows(config, tokenizer, 128, "heldout"))


@settings(deadline=None)
@given(
    available=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    means=st.lists(st.floats(1, 100), min_size=4, max_size=4),
    weights=st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
)
def test_shares_never_exceed_what_there_is_and_exhaust_one_source(available, means, weights):
    count = len(available)
    labels = [round(rows * mean) for rows, mean in zip(available, means[:count], strict=True)]
    taken = rows_taken(available, labels, weights[:count])
    assert all(1 <= some <= rows for some, rows in zip(taken, available, strict=True))
    assert any(some == rows for some, rows in zip(taken, available, strict=True))
    given_each = [t * lab / rows / w for t, lab, rows, w in zip(taken, labels, available, weights, strict=False)]
    step = [lab / rows / w for lab, rows, w in zip(labels, available, weights, strict=False)]
    for i in range(count):  # equal up to one row, where rounding up to one row does not decide
        if all(some > 1 for some in taken):
            assert all(abs(given_each[i] - given_each[j]) <= (step[i] + step[j]) * 0.51 for j in range(count))
    order = interleave(taken, available)
    assert len({tuple(place) for place in order.tolist()}) == sum(taken)
    for source in range(count):
        own = order[order[:, 0] == source, 1]
        assert own.tolist() == [i * available[source] // taken[source] for i in range(taken[source])]  # evenly spread


def composed(*overrides):
    register("eesd", EesdConfig)
    with initialize_config_dir(str(CONF_DIR), version_base=None):
        return build(EesdConfig, compose("eesd", overrides=["target=t", *overrides])).data


def test_self_distillation_and_its_ablation_are_configs():
    data = composed("data=self_distillation")
    assert [(name, weight) for name, weight, _ in data.parts()] == [("generated", 0.5), ("open", 0.5)]
    assert data.mix["generated"].path == ("runs/generate_responses/responses-*.jsonl",)
    other = composed("data=self_distillation", "data@data.mix.open=sharegpt", "data.mix.open.weight=2")
    assert (other.mix["open"].template, other.mix["open"].weight) == ("vicuna", 2.0)
    without = composed("experiment=eesd/without_self_distillation")
    assert [name for name, _, _ in without.parts()] == ["open"]
    assert without.mix["open"] == data.mix["open"]
    with pytest.raises(
        UserError, match=r"^data\.mix\.open\.weight=-1\.0: expected a number greater than or equal to 0"
    ):
        composed("data=self_distillation", "data.mix.open.weight=-1")

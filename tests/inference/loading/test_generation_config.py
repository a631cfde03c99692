"""What a target's generation config does to greedy decoding, it does in every arm: as its user's `generate`."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from outrider.data_prep.text.prompts import Prompt
from outrider.draft_models.targets.open_target import load_tokenizer
from outrider.inference.loading.generation_config import (
    _ACTING,
    TextSettings,
    find_acting_fields,
    find_other_strategies,
)
from outrider.inference.measure import prepared
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS, MethodConfig, StopConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from tests.inference.evaluate import evaluating
from tests.inference.evaluate.evaluating import refused
from tests.tiny import byte_tokenizer, open_stack, random_prompt, save_target

NEW = 16
PROMPT = random_prompt(12, seed=1)
CHAIN = StopConfig(rule="fixed", max_draft=4)
METHODS = {
    "chain": MethodConfig("small_lm", stop=CHAIN),
    "opt_tree": MethodConfig("small_lm", StructureConfig("opt_tree", nodes=10, delta=0.0)),
    "k_config": MethodConfig("small_lm", StructureConfig("k_config", widths=(3, 2, 1))),
    "lookup": MethodConfig("prompt_lookup", stop=CHAIN),
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose generation config says nothing that acts."""
    return save_target(tmp_path_factory.mktemp("bare"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def text(bare: Path) -> list[int]:
    """Its greedy text after `PROMPT`."""
    return of_the_user(bare)


def spelled(tokens: list[int]) -> str:
    return byte_tokenizer().decode(tokens)


def of_the_user(path: Path, prompt: list[int] = PROMPT) -> list[int]:
    """`model.generate(do_sample=False)` of the target as its user loads it."""
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([prompt])
    helped = {"tokenizer": load_tokenizer(str(path))} if model.generation_config.stop_strings else {}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **helped)
    sequences = out.sequences if model.generation_config.return_dict_in_generate else out
    return sequences[0, len(prompt) :].tolist()


@pytest.fixture
def saying(bare: Path, tmp_path: Path) -> Callable[..., Path]:
    """The target with these fields in its generation config."""

    def save(**fields: Any) -> Path:
        path = shutil.copytree(bare, tmp_path / "target", dirs_exist_ok=True)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 259, **fields}))
        return path

    return save


ASKED = [Prompt("p", "c", ("text",), False)]


def config_of(path: Path, out_dir: Path, **options: Any) -> EvaluateConfig:
    return EvaluateConfig(
        target=str(path), small_lm=str(path), methods=METHODS, max_new_tokens=NEW, device="cpu", threads=1,
        out_dir=str(out_dir), **options,
    )  # fmt: skip


def evaluate(path: Path, out_dir: Path, prompt: list[int] = PROMPT, **options: Any) -> dict[str, list[int]]:
    """What every arm of evaluate-checkpoint emits. The report is in `out_dir`."""
    with patch.object(prepared, "render_prompt", lambda *_, **__: prompt):
        evaluating.evaluate(config_of(path, out_dir, **options), ASKED)
    lines = map(json.loads, (out_dir / "generations.jsonl").read_text().splitlines())
    return {line["arm"]: line["tokens"] for line in lines}


def cases(text: list[int]) -> dict[str, tuple[dict[str, Any], list[int]]]:
    """Fields that change the greedy `text`, one by one and together, and a prompt."""
    end = {"eos_token_id": [text[4], 250]}
    return {
        "repetition_penalty": ({"repetition_penalty": 1.5}, PROMPT),
        "encoder_repetition_penalty": ({"encoder_repetition_penalty": 2.5}, PROMPT),
        "no_repeat_ngram_size": ({"no_repeat_ngram_size": 1}, PROMPT),
        "encoder_no_repeat_ngram_size": ({"encoder_no_repeat_ngram_size": 1}, [*PROMPT, *text[:6]]),
        "bad_words_ids": ({"bad_words_ids": [[text[2]], text[4:6]]}, PROMPT),
        "min_length": ({"min_length": len(PROMPT) + 8, **end}, PROMPT),
        "min_new_tokens": ({"min_new_tokens": 8, "min_length": 900, **end}, PROMPT),
        "forced_bos_token_id": ({"forced_bos_token_id": 77, "begin_suppress_tokens": [text[0]]}, PROMPT[:1]),
        "forced_eos_token_id": ({"forced_eos_token_id": [201, 202]}, PROMPT),
        "exponential_decay_length_penalty": (
            {"exponential_decay_length_penalty": [3, 1.8], "eos_token_id": 250},
            PROMPT,
        ),
        "suppress_tokens": ({"suppress_tokens": text[3:5]}, PROMPT),
        "begin_suppress_tokens": ({"begin_suppress_tokens": text[:1]}, PROMPT),
        "sequence_bias": ({"sequence_bias": [[[text[1]], -90.0], [[text[3], text[4]], -90.0], [[8], 0.5]]}, PROMPT),
        "stop_strings": ({"stop_strings": ["never said", spelled(text[6:8])]}, PROMPT),
        "several": (
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[text[2]]], "min_new_tokens": 5,
             "forced_eos_token_id": 9, "suppress_tokens": [text[4]], "renormalize_logits": True, "temperature": 0.7,
             "do_sample": True, "top_p": 0.8, "max_length": 3, "use_cache": False, "return_dict_in_generate": True,
             "chat_format": "chatml", "remove_invalid_values": True, "eos_token_id": text[3]},
            PROMPT,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", cases([0] * NEW))
@pytest.mark.slow
def test_every_arm_equals_the_users_own_call(
    saying: Callable[..., Path], text: list[int], name: str, tmp_path: Path
) -> None:
    fields, prompt = cases(text)[name]
    path = saying(**fields)
    expected = of_the_user(path, prompt)
    found = evaluate(path, tmp_path / "out", prompt)
    assert found == dict.fromkeys([AUTOREGRESSIVE, *METHODS, TRANSFORMERS], expected)
    ends = {key: value for key, value in fields.items() if key == "eos_token_id"}
    assert of_the_user(saying(**ends), prompt) != expected  # or this test could not fail


def test_every_field_that_acts_has_a_case() -> None:
    known = set(cases([0] * NEW)) | {"remove_invalid_values", "renormalize_logits"}
    assert known == {*_ACTING, "stop_strings", "several"}


def ids(chance: Random, least: int = 1, most: int = 4) -> list[int]:
    return [chance.randrange(40) for _ in range(chance.randint(least, most))]


FIELDS: dict[str, Callable[[Random], Any]] = {
    "sequence_bias": lambda r: [[[token], r.uniform(-5, 5)] for token in {*ids(r)}] + [[ids(r, 2, 3), 4.0]],
    "encoder_repetition_penalty": lambda r: r.choice([1.0, 1.5, 0.5]),
    "repetition_penalty": lambda r: r.choice([1.0, 1.05, 0.7, 2.0]),
    "no_repeat_ngram_size": lambda r: r.randrange(4),
    "encoder_no_repeat_ngram_size": lambda r: r.randrange(3),
    "bad_words_ids": lambda r: [ids(r, 1, 2) for _ in range(3)],
    "min_length": lambda r: r.randrange(12),
    "min_new_tokens": lambda r: r.randrange(5),
    "forced_bos_token_id": lambda r: r.randrange(40),
    "forced_eos_token_id": lambda r: r.choice([r.randrange(40), ids(r)]),
    "remove_invalid_values": lambda r: r.choice([True, False]),
    "exponential_decay_length_penalty": lambda r: [r.randrange(4), r.uniform(1.01, 2)],
    "suppress_tokens": ids,
    "begin_suppress_tokens": ids,
    "renormalize_logits": lambda r: r.choice([True, False]),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_scores_of_generate_itself(small: PreTrainedModel, temperature: float) -> None:
    """Any fields together, step by step of a text: the same processors, made of the same values, in the same order.

    Also where it samples, and where `sampling` has a penalty of its own.
    """
    compared = sum(same_scores(small, temperature, Random(seed)) for seed in range(60))
    assert compared > 40


def same_scores(small: PreTrainedModel, temperature: float, chance: Random) -> bool:
    """False for fields by which there is no text, as they contradict each other."""
    fields = {name: make(chance) for name, make in FIELDS.items() if chance.random() < 0.4}
    prompt, penalty = ids(chance, *chance.choice([(1, 1), (2, 8)])), chance.choice([None, None, 1.0, 1.3])
    sampling = SamplingConfig(temperature, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=penalty)
    try:
        own = GenerationConfig(**fields)
    except ValueError:
        return False
    settings = TextSettings(5, [41, 42], sampling, own)
    run = settings.for_generate()
    for option in ("output_scores", "output_logits", "return_dict_in_generate"):
        setattr(run, option, True)
    text = torch.tensor([prompt])
    torch.manual_seed(0)
    try:
        out = small.generate(text, attention_mask=torch.ones_like(text), generation_config=run)
    except RuntimeError:  # nothing left to draw from: a decay of −∞, where another field forces a token
        return False
    texts = [out.sequences[0, : len(prompt) + step] for step in range(len(out.logits))]
    logits, scores = torch.cat(out.logits), torch.cat(out.scores)
    sampler = settings.sampler(prompt, torch.device("cpu"))
    if sampler is None:
        assert torch.equal(scores, logits), fields
        return True
    found = sampler.scores(logits, texts)
    if run.renormalize_logits and temperature:  # after the warpers there: all scores of a row are shifted alike
        found = found.log_softmax(-1)
    torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-5, equal_nan=True, msg=str(fields))
    if not run.renormalize_logits:
        branches = [torch.cat([texts[-1][:-1], token]) for token in text[0, :3, None]]  # of one length, so at once
        rows = logits[-1:].expand(len(branches), -1)
        alone = [sampler.scores(row[None], [branch]) for row, branch in zip(rows, branches, strict=True)]
        assert torch.equal(sampler.scores(rows, branches).nan_to_num(), torch.cat(alone).nan_to_num()), fields
    return True


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("small")
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return open_stack(save_target(folder, bos_token_id=None, **sizes))[0]


def test_invalid_values_are_removed() -> None:
    """Where a target's logits are not numbers."""
    settings = TextSettings(4, generation=GenerationConfig(remove_invalid_values=True))
    sampler = settings.sampler([1, 2], torch.device("cpu"))
    assert sampler is not None
    assert sampler.scores(torch.tensor([[1.0, torch.nan, 2.0]])).argmax() == 2


def test_without_a_field_that_acts_nothing_is_done_to_logits() -> None:
    idle = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "repetition_penalty": 1.0, "max_length": 4096,
            "no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1, "chat_format": "x", "eos_token_id": [4, 5],
            "early_stopping": False, "length_penalty": 1.0, "guidance_scale": 1.0, "use_cache": True}  # fmt: skip
    own = GenerationConfig(**idle)
    assert find_acting_fields(own) == find_other_strategies(own) == {}
    for config in (None, own):
        assert TextSettings(4, (4, 5), generation=config).sampler([1, 2], torch.device("cpu")) is None
    for config, reads_ids in ((own, False), (GenerationConfig(suppress_tokens=[1]), True)):
        sampler = TextSettings(4, (4, 5), SamplingConfig(temperature=0.5), config).sampler([1, 2], torch.device("cpu"))
        assert sampler is not None
        assert (sampler.reads_context, sampler.reads_ids) == (False, reads_ids)


def test_what_is_taken_over_is_said_and_kept_to(saying: Callable[..., Path], text: list[int], tmp_path: Path) -> None:
    """In both reports; another config, or one that is ignored, is another run."""
    path, out_dir = saying(repetition_penalty=1.5, suppress_tokens=[text[3]]), tmp_path / "out"
    evaluate(path, out_dir)
    report = json.loads((out_dir / "report.json").read_text())["reports"][0]
    taken = {"repetition_penalty": 1.5, "suppress_tokens": [text[3]]}
    assert report["generation_config"] == {"from": "target", "taken_over": taken, "ignored": {}}
    said = f"target's generation config, in all arms: repetition_penalty 1.5, suppress_tokens [{text[3]}]."
    assert said in (out_dir / "report.md").read_text()
    evaluate(path, out_dir, resume=True)
    again, other = config_of(path, out_dir, resume=True), SamplingConfig(repetition_penalty=1.1)
    absent = r"settings: generation_config.repetition_penalty=absent \(was 1.5\)"
    refused(replace(again, sampling=other), absent, ASKED)
    refused(replace(again, generation_config="none"), "generation_config.suppress_tokens=absent", ASKED)
    saying(repetition_penalty=1.4, suppress_tokens=[text[3]])
    refused(again, r"generation_config.repetition_penalty=1.4 \(was 1.5\)", ASKED)


def test_a_config_that_is_ignored_is_named_and_changes_nothing(
    saying: Callable[..., Path], text: list[int], tmp_path: Path
) -> None:
    fields = {"repetition_penalty": 1.5, "guidance_scale": 1.5, "stop_strings": ["a"], "suppress_tokens": [*range(99)]}
    texts = evaluate(saying(**fields), tmp_path / "out", generation_config="none")
    assert texts == dict.fromkeys([AUTOREGRESSIVE, *METHODS, TRANSFORMERS], text)
    report = (tmp_path / "out/report.md").read_text()
    assert [name for name in fields if f"{name} " not in report] == []


def test_a_penalty_or_stop_strings_that_are_given_win(
    saying: Callable[..., Path], text: list[int], tmp_path: Path
) -> None:
    path = saying(repetition_penalty=1.5, stop_strings=[spelled(text[2:3])])
    given = {"sampling": SamplingConfig(repetition_penalty=1.0), "stop_strings": [spelled(text[6:7])]}
    found = evaluate(path, tmp_path / "out", **given)
    assert found == dict.fromkeys(found, text[:7])
    report = json.loads((tmp_path / "out/report.json").read_text())["reports"][0]
    assert report["generation_config"]["taken_over"] == {}
    assert "greedy (repetition_penalty 1)" in (tmp_path / "out/report.md").read_text()


def test_fields_of_an_older_model_are_in_its_config(bare: Path, tmp_path: Path) -> None:
    """config.json, which transformers turns to where there is no generation_config.json."""
    path = shutil.copytree(bare, tmp_path / "target")
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "no_repeat_ngram_size": 1}))
    expected = of_the_user(path)
    assert expected != of_the_user(bare)
    assert evaluate(path, tmp_path / "out") == dict.fromkeys([AUTOREGRESSIVE, *METHODS, TRANSFORMERS], expected)


@pytest.mark.parametrize(("fields", "message"), [
    ({"num_beams": 4}, "num_beams=4, which is a way of decoding that no arm here has"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"prompt_lookup_num_tokens": 10}, "prompt_lookup_num_tokens=10"),
    ({"watermarking_config": {"greenlist_ratio": 0.3}}, "watermarking_config=WatermarkingConfig"),
    ({"constraints": [1]}, r"constraints=\[1\]"),
    ({"max_time": 2.0}, "max_time=2.0"),
    ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
    ({"bad_words_ids": [[999]]}, r"bad_words_ids=\[\[999\]\], which transformers cannot use"),
    ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0, which transformers cannot use"),
    ({"forced_eos_token_id": 999}, "forced_eos_token_id=999, which transformers cannot use"),
    ({"stop_strings": 5}, "generation_config.json: stop_strings=5: expected a valid string or a valid (list|array)"),
    ({"eos_token_id": "2"}, "eos_token_id='2': expected a valid integer or a valid (list|array)"),
    ({"encoder_no_repeat_ngram_size": 10**12}, "encoder_no_repeat_ngram_size=.*expected 1024 at most"),
    ({"exponential_decay_length_penalty": [3], "eos_token_id": 2}, r"penalty=\[3\], which transformers cannot use"),
    ({"stop_strings": ["ß"], "eos_token_id": 3}, None),
    ({"cache_implementation": "unheard of"}, "damaged generation config"),
])  # fmt: skip
def test_what_no_arm_can_do_is_refused(
    saying: Callable[..., Path], fields: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    """By name and value, before the weights are read."""
    made = config_of(path := saying(**fields), tmp_path / "out")
    if message is None:
        with pytest.raises(TypeError):  # it would have been loaded
            refused(made, "", ASKED)
        return
    refused(made, f"{path}.*{message}", ASKED)
    assert not (tmp_path / "out/results-00000.jsonl").exists()

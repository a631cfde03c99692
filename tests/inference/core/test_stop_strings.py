"""Texts end at stop strings exactly where transformers' `generate(stop_strings=…)` ends them, in every arm."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation.stopping_criteria import StopStringCriteria

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.inference.core.stop_strings import StopStrings
from outrider.inference.loading.generation_config import TextSettings
from outrider.inference.measure.arms import make_arms
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from tests.tiny import open_stack, save_target

VOCABULARY, NEW = 24, 16
CHAIN = StopConfig(rule="fixed", max_draft=5)
METHODS = {
    "chain": MethodConfig("small_lm", stop=CHAIN),
    "opt_tree": MethodConfig("small_lm", StructureConfig("opt_tree", nodes=8, delta=0.0)),
    "k_config": MethodConfig("small_lm", StructureConfig("k_config", widths=(2, 1, 1, 1))),
    "lookup": MethodConfig("prompt_lookup", stop=CHAIN),
}
BASE = "abcdef"  # what transformers puts before a token to see its text


def make_target(path: Path, **sizes: int) -> SimpleNamespace:
    """A target, to be its own drafter, so that most drafts are right, and the user's copy of it."""
    model, stack = open_stack(save_target(path, bos_token_id=None, **sizes))
    user = AutoModelForCausalLM.from_pretrained(path)
    user.generation_config.pad_token_id = 0
    return SimpleNamespace(model=model, stack=stack, user=user)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One of few tokens, whose text therefore goes in circles."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return make_target(tmp_path_factory.mktemp("target"), **sizes)


def generate(target: SimpleNamespace, prompt: list[int], **options: object) -> list[int]:
    """What the user's own greedy call emits."""
    ids = torch.tensor([prompt])
    out = target.user.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **options)
    return out[0, len(prompt) :].tolist()


def run_arms(target: SimpleNamespace, prompt: list[int], stops: Sequence[str], tokenizer: object) -> dict[str, list]:
    settings = TextSettings(NEW, stops=stops, tokenizer=tokenizer)
    arms = make_arms(target.stack, {"small_lm": target.stack}, METHODS, target.model, settings)
    found = {name: arm(prompt, Streams(0)) for name, arm in arms.items()}
    assert all(r.accepted <= len(r.tokens) for generation in found.values() for r in generation.rounds)
    return {name: list(generation.tokens) for name, generation in found.items()}


def tokenizer_of(tokens: Sequence[str], decoder: object, **options: object) -> PreTrainedTokenizerFast:
    """A tokenizer of these tokens, by id."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


cleaned_up = partial(tokenizer_of, decoder=decoders.Fuse(), clean_up_tokenization_spaces=True)
SPACES = partial(tokenizer_of, decoder=decoders.Metaspace())
BYTES = partial(tokenizer_of, decoder=decoders.ByteLevel())
STEPS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def spelled(piece: str) -> str:
    """A text as byte-level tokens write it."""
    table = bytes_to_unicode()
    return "".join(table[byte] for byte in piece.encode())


LETTERS = ("a", "t", "tp", "p", " n", "'t", "do", "n", ".", " .", "ta", "at", "é", " a", " t", "\n", "\n\n", "...", "…")
KINDS: dict[str, tuple[Callable[[Sequence[str]], PreTrainedTokenizerFast], list[str]]] = {
    # Halves of "é" and thirds of "…" are tokens of their own, too.
    "byte_level": (BYTES, [*map(spelled, LETTERS), "Ã", "©", "â", "Ģ", "¦", "©t", "tÃ"]),
    "sentence_pieces": (
        partial(tokenizer_of, decoder=decoders.Sequence(STEPS)),
        [*(piece.replace(" ", "▁") for piece in LETTERS), "<0x0A>", "<0xC3>", "<0xA9>", "▁", "▁▁"],
    ),
    "metaspace": (SPACES, [*(piece.replace(" ", "▁") for piece in LETTERS), "▁", "▁▁", "<s>", "ttt", ""]),
    "word_pieces": (partial(tokenizer_of, decoder=decoders.WordPiece(prefix="##", cleanup=True)),
                    ["do", "##n", "n", "'", "##'t", "n't", ".", ",", "a", "##t", "t", "##tp", "p", "at", "##a",
                     "##.", "!", "?", "##p", "'s", "is", "##is", "##n't", "not"]),
    "cleaned_up": (cleaned_up, [*LETTERS, " n't", "'s", " '", " ,", ",", "  "]),
    "spaced": (partial(tokenizer_of, decoder=None), [*LETTERS, "##n", "b", "c", "nn", "pp", ""]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_equals_generate(target: SimpleNamespace, kind: str) -> None:
    """Any tokens, any stops: parts of the text around the prompt's end or later, from within a token, or none of it."""
    make, pool = KINDS[kind]

    @given(st.integers(0, 10**6))
    @settings(deadline=None, max_examples=18)
    def check(seed: int) -> None:
        chance = random.Random(seed)
        tokens = [BASE, *chance.sample(pool, VOCABULARY - 1)] if len(pool) >= VOCABULARY - 1 else [BASE, *pool]
        tokenizer = make(tokens)
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 2, 9]))]
        text = [*prompt, *generate(target, prompt)]
        stops = []
        for _ in range(chance.choice([1, 1, 2, 3])):
            start = max(0, len(prompt) - 1 + chance.choice([0, 0, *range(NEW)]))
            piece = tokenizer.decode(text[start : start + chance.choice([1, 2, 3])], clean_up_tokenization_spaces=False)
            inside = chance.randrange(max(1, len(piece)))
            stops.append(piece[inside : inside + chance.choice([1, 2, 9])] or chance.choice(LETTERS))
        try:
            expected = generate(target, prompt, stop_strings=stops, tokenizer=tokenizer)
        except ValueError:  # no token ends like that
            with pytest.raises(
                UserError, match=r"stop_strings=.*: transformers cannot look for them with this tokenizer"
            ):
                StopStrings(stops, tokenizer)
            return
        found = run_arms(target, prompt, stops, tokenizer)
        assert found == dict.fromkeys(found, expected), (tokens, stops)

    check()


def test_the_work_of_a_round_and_of_new_stop_strings_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are looked at one by one only where a stop string is; a vocabulary is read once, whatever is asked for."""
    tokenizer, calls = cleaned_up([BASE, "at", "ab", "t"]), list[str]()
    for owner, name in ((StopStrings, "_begin"), (StopStringCriteria, "clean_tokenizer_vocab")):
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, name=name, call=call, **more: (calls.append(name), call(*a, **more))[1]
        )
    assert StopStrings(["ab to at"], tokenizer).first_end([2, 3, 0] * 800, 600) is None
    assert StopStrings(["tab"], tokenizer).first_end([2, 0] * 9 + [3, 2, 1], 6) == 5
    assert calls == ["clean_tokenizer_vocab", *["_begin"] * 5]

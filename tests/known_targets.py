"""Targets that are sure of their next tokens, with drafters of every kind that are often right for them."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.base.streams import Streams
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.draft_vocabulary import narrow
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.early_exit.model import EarlyExit
from outrider.draft_models.mtp.model import MtpHead
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.narrowed import DraftVocabulary
from outrider.draft_models.targets.open_target import load_tokenizer
from outrider.inference.core.rounds import Round
from outrider.inference.drafters.dflash.drafter import OneBlock
from outrider.inference.drafters.draft_model import OnePass
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.drafters.early_exit.drafter import draft_model_of
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import make_prompt_lookup
from outrider.inference.drafters.skip_layers.drafter import SkipLayersDraftModel
from outrider.inference.drafters.small_lm.drafter import SmallLMDraftModel, SmallLMPasses
from outrider.inference.drafters.small_lm.drafter import draft_model_of as draft_model_of_lm
from outrider.inference.settings.method import MethodConfig
from outrider.inference.shapes.factory import Structure, make_structure
from outrider.train.parts.drafter import export_model
from tests.fitted_heads import fitted_block, fitted_head, fitted_mtp
from tests.pard2_files import add_projection, random_projection
from tests.tiny import LAYERS, VOCABULARY, make_drafter, open_stack, random_prompt, reference_generate, save_target

EXITS = {  # exit layer, depth; a tie of the head to the target's
    "early_exit": (LAYERS - 1, 1, True),
    "early_exit, some tokens": (LAYERS - 1, 1, True),
    "early_exit, shared head": (LAYERS - 1, 1, False),
    "early_exit, first layer": (1, 1, True),
    "early_exit, two layers": (LAYERS - 2, 2, True),
    "early_exit, one pass": (LAYERS - 1, 1, True),
}
OTHER_LMS: dict[str, dict[str, Any]] = {  # of other weights, which are seldom right
    "small_lm, wider vocabulary": {"vocab_size": VOCABULARY + 60},
    "small_lm, narrower vocabulary": {"vocab_size": 200},
    "small_lm, another family": {},
}
SOURCES = (
    *EXITS,
    "small_lm",
    "small_lm, some tokens",
    "small_lm, one pass",
    "small_lm, PARD-2",
    *OTHER_LMS,
    "skip_layers",
    "eagle3",
    "mtp",
    "dflash",
    "dflash, markov",
)
BLOCKS = {"dflash": 0, "dflash, markov": 6}  # and the rank of the Markov head
SELDOM_RIGHT = {"early_exit, first layer", *OTHER_LMS}
PROMPT, COUNT = random_prompt(20), 40  # what heads are fitted to, and some drafters know the tokens of


class Target:
    """A saved target, in sliding windows shorter than the texts where its architecture has them."""

    def __init__(self, folder: Path, architecture: str = "mistral", dtype: torch.dtype = torch.float64, **changes: Any):
        self.folder, self.architecture, self.dtype = folder, architecture, dtype
        self.path = save_target(folder / "target", architecture, **{"kv_heads": 2, "peak": 6.0, **changes})
        self.model, self.stack = open_stack(self.path, dtype)
        self.small, self.block = cache(self._small), cache(self._block)
        self.text = cache(lambda prompt, count: tuple(reference_generate(self.model, prompt, count)))

    def text_after(self, prompt: Sequence[int], count: int) -> list[int]:
        """What `generate` emits."""
        return list(self.text(tuple(prompt), count))

    @cached_property
    def some_tokens(self) -> torch.Tensor:
        return torch.tensor(sorted({*PROMPT, *self.text_after(PROMPT, COUNT)[::2]}))

    @cached_property
    def head(self) -> Eagle3:
        return fitted_head(self.stack, self.answers)

    @cached_property
    def mtp(self) -> MtpHead:
        return fitted_mtp(self.stack, self.answers[:2])

    @property
    def answers(self) -> list[tuple[list[int], list[int]]]:
        prompts = [PROMPT, *(random_prompt(length) for length in (9, 1, 23))]
        return [(prompt, self.text_after(prompt, COUNT)) for prompt in prompts]

    def _block(self, kind: str) -> DFlash:
        return fitted_block(self.stack, self.answers, rank=BLOCKS[kind])

    def exit(self, kind: str, noise: float = 0.15) -> EarlyExit:
        layer, depth, own_head = EXITS[kind]
        some = self.some_tokens if kind.endswith("some tokens") else None
        shape: dict[str, Any] = {"own_head": own_head, "depth": depth, "parallel": 3 * kind.endswith("one pass")}
        made = make_drafter(self.path, layer, noise, tokens=some, dtype=self.dtype, **shape)
        if not own_head:
            made.use_head(self.stack.head)
        return made

    def _small(self, kind: str) -> Any:
        folder = self.folder / kind.replace(", ", "_").replace(" ", "_")
        if kind in OTHER_LMS:
            other = "llama" if self.architecture != "llama" else "qwen3"
            family = other if kind.endswith("family") else self.architecture
            save_target(folder, family, num_hidden_layers=2, seed=3, **OTHER_LMS[kind])
        else:
            made = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype)
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in made.parameters():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=self.dtype)
                    parameter += 0.1 * parameter.std() * noise
            if kind.endswith("some tokens"):
                narrow(made, DraftVocabulary(self.some_tokens, self.stack.config.vocab_size))
            export_model(made, load_tokenizer(str(self.path)), folder)
        if kind == "small_lm, PARD-2":
            add_projection(folder, random_projection(64, 64), bias=torch.randn(64) / 10)
        target = self.stack.config
        small: Any = load_small_lm(str(folder), load_tokenizer(str(self.path)), dtype=self.dtype, target=target)
        small.target_norm = [self.stack.norm]
        return small

    def source(self, kind: str, noise: float = 0.15) -> Any:
        """A new draft model of this kind."""
        if kind == "small_lm, one pass":
            return OnePass(SmallLMPasses(self.small("small_lm")), VOCABULARY - 1, 3)
        if kind == "small_lm, PARD-2":
            return draft_model_of_lm(self.small(kind))
        if kind.startswith("small_lm"):
            return SmallLMDraftModel(self.small(kind))
        if kind.startswith("dflash"):
            return OneBlock(self.block(kind))
        if kind == "skip_layers":
            return SkipLayersDraftModel([LAYERS - 1])
        heads = {"eagle3": lambda: self.head, "mtp": lambda: self.mtp}
        return Eagle3DraftModel(heads[kind]()) if kind in heads else draft_model_of(self.exit(kind, noise))

    def drafter(self, kind: str, method: MethodConfig, seed: int = 0, *, drawn: bool = False) -> ModelDrafter:
        return self.shaped(kind, method, make_structure(method, Streams(seed), drawn))

    def shaped(self, kind: str, method: MethodConfig, structure: Structure, noise: float = 0.15) -> ModelDrafter:
        """The drafter of `method` whose drafts have this structure."""
        return ModelDrafter(self.source(kind, noise), structure, copies=make_prompt_lookup(method, structure))


def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Target]:
    """Makes each target once."""
    return cache(lambda *given, **changes: Target(tmp_path_factory.mktemp("target"), *given, **changes))


def tokens_of(rounds: Iterable[Round]) -> list[int]:
    return [token for r in rounds for token in r.tokens]

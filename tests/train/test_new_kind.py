"""A trained kind from outside: its recipe, its format and its drafter are all in this file.

A bigram model guesses a token from the one before it alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import outrider
from outrider.base.errors import UserError
from outrider.base.settings import Count, RunConfig, free
from outrider.base.streams import Streams
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.losses import linear_cross_entropy
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.core.drafter import DraftModel
from outrider.inference.core.session import Session
from outrider.inference.drafters.draft_model import BesideTarget
from outrider.inference.drafters.model_plugin import ModelDrafterPlugin
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.kinds import KINDS, register
from outrider.inference.settings.method import MethodConfig
from outrider.train.core.driver import training_run
from outrider.train.core.training import Metrics, Student
from outrider.train.parts.heldout import Decoding
from outrider.train.settings.fit import FitConfig
from tests.refusals import refusal
from tests.train.jobs import FIT, log

WEIGHTS_FILE = "bigram.safetensors"


class Bigram(Student):
    """Logits of the next token from an embedding of this one."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor) -> dict[str, Tensor]:
        """{"loss_sum"}: the cross-entropy of the labels, summed over the supervised positions of a batch [B, T]."""
        return {"loss_sum": linear_cross_entropy(self.embedding(input_ids), self.head.weight, labels)}


@dataclass(frozen=True, kw_only=True)
class BigramConfig(RunConfig):
    """Settings of the training."""

    target: str = free()
    data: DataConfig
    fit: FitConfig
    width: Count = 16
    seq_len: Count = 48
    decode_prompts: Count = 2
    decode_tokens: Count = 8


def train_bigram(config: BigramConfig) -> None:
    """The drafter is `config.out_dir` itself, with the weights of the highest τ."""
    target = open_target(config.target)
    with training_run(config) as run:
        rows = load_rows(config.data, target.tokenizer, config.seq_len, "train")
        heldout = load_rows(config.data, target.tokenizer, config.seq_len, "heldout", max_rows=4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(Streams(config.fit.seed).number("weights", bits=64))
            student = Bigram(target.config.vocab_size, config.width)
        stack = target.stack(dtype=torch.float32)
        decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)
        identity = config.decisions() | {"target": target.fingerprint.weights, "data_key": rows.key}

        def evaluate(step: int) -> Metrics:
            return decoding(stack, BigramDraftModel(student))

        result = run.fit(
            student, rows, config.fit, identity=identity, evaluate=evaluate, keeps_best=True, last_file=WEIGHTS_FILE
        )
        if result is not None:
            save_file(student.state_dict(), run.out_dir / WEIGHTS_FILE, {"step": str(result.step)})
            print(f"saved drafter={config.out_dir}", flush=True)


class BigramDraftModel(BesideTarget):
    """It needs nothing but the token, so there is nothing to commit."""

    predicted: Tensor | None = None

    def __init__(self, model: Bigram):
        self.model = model

    def begin(self, session: Session) -> None:
        self.target_session = session

    @torch.no_grad()
    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        self.hidden = self.model.embedding(tokens)
        logits: Tensor = self.model.head(self.hidden)
        return logits

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        pass


class BigramPlugin(ModelDrafterPlugin):
    """The model is a `Bigram`."""

    def identity(self, where: str | None) -> dict[str, Any]:
        return {"bigram": where}

    def load(self, where: str, target: Any, methods: Mapping[str, MethodConfig], **placed: Any) -> Bigram:
        if not (Path(where) / WEIGHTS_FILE).exists():
            raise UserError(f"bigram={where}: no {WEIGHTS_FILE} there")
        weights = load_file(Path(where) / WEIGHTS_FILE)
        model = Bigram(*weights["embedding.weight"].shape)
        model.load_state_dict(weights)
        return model.to(placed["device"])

    def draft_model(self, model: Bigram, method: MethodConfig) -> DraftModel:
        return BigramDraftModel(model)


@pytest.fixture
def bigram() -> Iterator[Kind]:
    """The kind, known while a test runs."""
    yield register(Kind("bigram", f"{__name__}:BigramPlugin", option="bigram", needs="a directory of train_bigram"))
    KINDS.pop("bigram", None)


@pytest.fixture
def run(target: Path, corpus: DataConfig, tmp_path: Path) -> BigramConfig:
    fit = replace(FIT, steps=8, lr=3e-2, log_every=1, eval_every=4)
    return BigramConfig(target=str(target), data=corpus, fit=fit, out_dir=str(tmp_path / "whole"))


def test_it_learns_and_a_finished_run_is_left_alone(run: BigramConfig, capsys: pytest.CaptureFixture[str]) -> None:
    train_bigram(run)
    lines = log(Path(run.out_dir))
    assert [line["step"] for line in lines if "eval_tau" in line] == [4, 8]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.3
    train_bigram(replace(run, resume=True))
    assert capsys.readouterr().out.endswith(f"{run.out_dir}: finished already\n")
    refusal(r"width=8 \(was 16\)", train_bigram, replace(run, width=8, resume=True))
    refusal("holds an earlier run", train_bigram, run)


def test_a_directory_that_is_named_twice_is_held_once(run: BigramConfig, tmp_path: Path) -> None:
    """A calibration head's out_dir may be its drafter's, by whatever path."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "whole")
    folders = (str(tmp_path / "link"), run.out_dir)
    with training_run(run, None, *folders) as entered:
        assert entered.out_dir == tmp_path / "whole"
    with (
        pytest.raises(UserError, match=r"^checkpoint=/proc/drafter: cannot be written"),
        training_run(run, None, "/proc/drafter"),
    ):
        pass


def test_it_drafts_losslessly(bigram: Kind, run: BigramConfig) -> None:
    train_bigram(run)
    given = {"method": MethodConfig("bigram"), "drafters": {"bigram": run.out_dir}}
    model = outrider.load(run.target, device="cpu", **given)
    alone = outrider.load(run.target, device="cpu")
    for prompt in ("to be or ", "the quick brown "):
        assert model.generate(prompt, max_new_tokens=20) == alone.generate(prompt, max_new_tokens=20)
    with pytest.raises(UserError, match=f"no {WEIGHTS_FILE} there"):
        outrider.load(run.target, device="cpu", method=given["method"], drafters={"bigram": run.target})

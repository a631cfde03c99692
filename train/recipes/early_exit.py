"""Recipe for EESD: an early exit is trained on the few target layers that it needs.

The training step is `EarlyExitStudent` (draft_models/early_exit/model.py): the frozen layers, the exit, its loss.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedConfig

from data_prep.text.rehearsal import rehearsable
from draft_models.acceptance import AcceptanceOf
from draft_models.card import CARD_FILE, write_card
from draft_models.early_exit.checkpoint import from_pretrained, parts_below, read_meta, save_pretrained
from draft_models.early_exit.model import USE, EarlyExitStudent, exit_layers
from draft_models.targets.fingerprint import Fingerprint
from draft_models.targets.open_target import OpenTarget, open_target, pick_dtype, stored_dtype
from draft_models.targets.stack import LayerStack
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.shaped import Calibrated
from inference.loading.memory_plan import GB, explained, planned_device
from inference.loading.memory_plan import describe as describe_memory
from inference.loading.targets import prepare
from outrider.processes import from_main, say
from train.core.driver import run_training
from train.core.training import Batch, Metrics, Trained, Training, TrainRows
from train.parts.drafter import parameters_of, pick_tokens, require_context, require_vocabulary
from train.parts.early_exit import as_started, default_exit_layer, describe, empty_student, make_student, memory_of
from train.parts.heldout import Decoding, HeldOutText, evaluation
from train.parts.top_k_rows import TaughtRows, load_taught_rows
from train.settings.drafters import EesdConfig


@rehearsable
def train_early_exit(config: EesdConfig) -> None:
    """Train an exit layer according to `config`. The drafter is `config.out_dir` (see `early_exit.checkpoint`).

    With `decode_prompts` it contains the weights with the highest τ of all evaluations, else the last ones. Raises
    `UserError` for an unusable target, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    start, config = config.start, as_started(config)
    exit_layer = config.exit_layer or default_exit_layer(target.config)
    require_vocabulary(config.draft_vocabulary, target.config)
    if config.plan:
        print(plan_of(config, target.config, exit_layer), flush=True)
        return
    with explained(lambda: memory_of(config, target.config, empty_student(config, target.config, exit_layer)[0])):
        run_training(config, Recipe(config, target, exit_layer, start).prepare)


def plan_of(config: EesdConfig, target: PreTrainedConfig, exit_layer: int) -> str:
    """What a training reads, trains and holds, as text."""
    student, read = empty_student(config, target, exit_layer)
    facts = {"exit_layer": f"{exit_layer}/{target.num_hidden_layers}", "read_parameters": read}
    facts |= {"read_gb": f"{read * stored_dtype(target).itemsize / GB:.2f}"}
    facts |= {"trained_parameters": parameters_of(student)[0]}
    return describe_memory(memory_of(config, target, student), planned_device(), **facts)


@dataclass(frozen=True)
class Recipe:
    """An exit after `exit_layer` layers of the target. start: the directory of an early exit to continue from."""

    config: EesdConfig
    target: OpenTarget
    exit_layer: int
    start: str | None

    def prepare(self, state: PartialState) -> Training[EarlyExitStudent]:
        """The training. Raises `UserError` for unusable or incompatible inputs."""
        config, target = self.config, self.target
        exit_layers(target.config, self.exit_layer)  # raises if there is no such layer
        require_context(target.config, config.seq_len, config.decode_tokens if config.decode_prompts else 0)
        fingerprint, trained_on = from_main(state, self._identify)
        rows, heldout = self._rows()
        begun = None
        if self.start is not None:
            begun = from_pretrained(self.start, target.config, fingerprint, dtype=torch.float32)
            tokens = begun.draft_tokens
        else:
            tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
        student = make_student(config, target, self.exit_layer, state.device, tokens, begun)
        say(describe(student, config, target.files, self.exit_layer))
        made = config.deciding() | {"exit_layer": self.exit_layer, "data_key": rows.key}
        made |= {} if self.start is None else {"start": read_meta(self.start).weights_sha256}
        known = asdict(fingerprint)
        if not self._reads_all:  # the local copy of a target on the Hub may have more files later
            known.pop("tensors")
        identity = {**made, "target": known, "trained_on": trained_on}

        def save(trained: Trained) -> None:
            facts = {**made, "fit": asdict(config.fit), "steps": trained.result.steps, "step": trained.step}
            facts |= {"metrics": trained.metrics, "training_seconds": trained.result.seconds}
            dtype = stored_dtype(target.config)
            save_pretrained(Path(config.out_dir), student.drafter, fingerprint, facts, dtype, trained_on)
            self._write_card(student, trained)

        return Training(
            student,
            rows,
            config.fit,
            identity,
            evaluation_of(config, target, heldout, student, active=state.is_main_process),
            save,
            finished=CARD_FILE,
            best_of=identity if config.decode_prompts else None,
            minutes=config.minutes,
        )

    @property
    def _reads_all(self) -> bool:
        return self.config.online or self.config.decode_prompts > 0

    def _identify(self) -> tuple[Fingerprint, dict[str, str]]:
        target = self.target
        known = target.fingerprinted(fetch=self._reads_all)
        return known, parts_below(target.files, target.config, self.exit_layer)

    def _rows(self) -> tuple[TaughtRows, TaughtRows]:
        """Training rows and held-out rows."""
        config, cached = self.config, self.config.teacher == "cached"
        given = (config.data, self.target.tokenizer, config.seq_len)
        rows = load_taught_rows(*given, "train", cached=cached)
        return rows, load_taught_rows(*given, "heldout", cached=cached, max_rows=config.eval_rows)

    def _write_card(self, student: EarlyExitStudent, trained: Trained) -> None:
        config, target, tokens = self.config, self.target.config, student.drafter.draft_tokens
        names = ("exit_depth", "train_head", "seq_len")
        facts: dict[str, object] = {"exit_layer": self.exit_layer, **{name: getattr(config, name) for name in names}}
        facts |= {"objective": config.loss} | ({"teacher": config.teacher} if config.distils else {})
        facts |= {} if self.start is None else {"went on from": Path(self.start).name}
        facts |= {} if tokens is None else {"tokens": f"{len(tokens)} of the target's {target.vocab_size}"}
        facts |= {"data": config.data.source, "steps": trained.result.steps}
        if config.decode_prompts:
            facts |= {"chosen step": trained.step, "tau": round(trained.metrics["tau"], 3)}
        elif "tau_analytic" in trained.metrics:
            facts |= {"tau_analytic": round(trained.metrics["tau_analytic"], 3)}
        write_card(Path(config.out_dir), USE, config.target, facts)
        layers_of_all = f"{self.exit_layer} of {target.num_hidden_layers}"
        say(f"saved drafter={Path(config.out_dir)} exit_layer={layers_of_all} step={trained.step}")


def evaluation_of(
    config: EesdConfig, target: OpenTarget, heldout: TrainRows, student: EarlyExitStudent, *, active: bool
) -> Callable[[EarlyExitStudent, int], Metrics] | None:
    """The evaluation during training, on the main process. active: whether this is the main process.

    Metric names are those of `HeldOutText.judge`, `Decoding` and `MovedNorms`. tau_analytic uses the whole target if it
    is loaded, for the loss or for `decode_prompts`. With the target's cached top-k it is a lower bound (see
    `acceptance_by_top_k`). Else it is absent.
    With `decode_prompts` the whole target is loaded too, for top1_target and real decoding.

    Construct it before `fit`: DeepSpeed shards every module constructed after its start.
    """
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)
    if not active:
        return None
    device, whole = student.stack.device, None
    if decoding.prompts:
        whole = target.stack(dtype=pick_dtype("auto", target.config, device), device=device)
    text = HeldOutText(heldout, config.eval_batch_rows, whole, acceptances=not student.online)

    def judge(student: EarlyExitStudent) -> Metrics:
        return text.judge(partial(judged, student))

    def decode(student: EarlyExitStudent) -> Metrics:
        return {} if whole is None else decode_student(student, whole, decoding)

    return evaluation(student, stored_dtype(target.config), judge, decode)


def judged(student: EarlyExitStudent, batch: Batch, accept: AcceptanceOf | None) -> tuple[Tensor, Tensor | None]:
    """The drafter's argmax and its acceptance probability, from `EarlyExitStudent.judged`."""
    device = student.stack.device
    return student.judged(**{key: value.to(device) for key, value in batch.items()}, accept=accept)


def decode_student(student: EarlyExitStudent, stack: LayerStack, decoding: Decoding) -> Metrics:
    """Metrics of real decoding by the whole target with the student's drafter."""
    shared = {id(head): head for head in student.drafter.shared_head}  # the target's, which must not be copied
    drafter = copy.deepcopy(student.drafter, shared).to(stack.dtype).requires_grad_(False)
    prepare(stack, {"early_exit": Calibrated(drafter)})
    return decoding(stack, EarlyExitSource(drafter))

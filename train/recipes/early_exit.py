"""Recipe for EESD: an early exit is trained on the few target layers that it needs.

The training step is `EarlyExitStudent.forward` (draft_models/early_exit/model.py): the frozen layers, the exit, its
loss.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.processes import from_main, say
from outrider.draft_models.acceptance import AcceptanceOf
from outrider.draft_models.card import CARD_FILE, write_card
from outrider.draft_models.early_exit.checkpoint import from_pretrained, parts_below, read_meta, save_pretrained
from outrider.draft_models.early_exit.model import USE, EarlyExit, EarlyExitStudent, exit_layers
from outrider.draft_models.targets.model_files import empty_layers
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import OpenTarget, open_target, pick_dtype, stored_dtype
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import TensorFiles
from outrider.inference.drafters.early_exit import EarlyExitSource
from outrider.inference.loading.memory_plan import GB, Held, Place, cache_bytes, explained, planned_device, weight_bytes
from outrider.inference.loading.memory_plan import describe as describe_memory
from outrider.inference.loading.rehearsal import rehearsable
from outrider.inference.loading.targets import prepare as prepare_drafters
from outrider.inference.settings.kinds import EARLY_EXIT
from outrider.train.core.driver import run_training
from outrider.train.core.training import Batch, Metrics, Trained, Training, TrainRows
from outrider.train.parts.drafter import (
    fit_memory,
    frozen_dtype,
    parameters_of,
    pick_tokens,
    require_context,
    require_vocabulary,
)
from outrider.train.parts.heldout import Decoding, HeldOutText, evaluation
from outrider.train.parts.top_k_rows import load_taught_rows
from outrider.train.settings.drafters import EesdConfig


@rehearsable
def train_early_exit(config: EesdConfig) -> None:
    """Train an exit layer according to `config`. The drafter is `config.out_dir` (see `early_exit.checkpoint`).

    With `decode_prompts` it contains the weights with the highest τ of all evaluations, else the last ones. Raises
    `UserError` for an unusable target, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    start, config = config.start, as_started(config)
    exit_layer = config.exit_layer or default_exit_layer(target.config)
    config = replace(config, exit_layer=exit_layer)
    require_vocabulary(config.draft_vocabulary, target.config)
    if config.plan:
        print(plan_of(config, target.config, exit_layer), flush=True)
        return
    with explained(lambda: memory_of(config, target.config, empty_student(config, target.config, exit_layer)[0])):
        run_training(config, partial(prepare, config, target, exit_layer, start))


def as_started(config: EesdConfig) -> EesdConfig:
    """`config` with `start` replaced by the shape of the early exit stored there."""
    if config.start is None:
        return config
    meta = read_meta(config.start)
    return replace(
        config,
        start=None,
        exit_layer=meta.exit_layer,
        exit_depth=meta.exit_depth,
        train_head=meta.own_head,
        train_layer=meta.own_layer,
        draft_vocabulary=meta.draft_vocabulary,
    )


def default_exit_layer(target: PreTrainedConfig) -> int:
    """The default exit layer N: 8 % of the layers, the middle of the paper's 5–10 %, and at least one."""
    return max(1, round(0.08 * target.num_hidden_layers))


def prepare(
    config: EesdConfig, target: OpenTarget, exit_layer: int, start: str | None, state: PartialState
) -> Training[EarlyExitStudent]:
    """The training of an exit after `exit_layer` layers. start: the directory of an early exit to continue from.

    Raises `UserError` for unusable or incompatible inputs.
    """
    exit_layers(target.config, exit_layer)  # raises if there is no such layer
    require_context(target.config, config.seq_len, config.decode_tokens if config.decode_prompts else 0)
    reads_all = config.online or config.decode_prompts > 0
    fingerprint = from_main(state, lambda: target.fingerprinted(fetch=reads_all))
    trained_on = from_main(state, lambda: parts_below(target.files, target.config, exit_layer))
    given, cached = (config.data, target.tokenizer, config.seq_len), config.teacher == "cached"
    rows = load_taught_rows(*given, "train", cached=cached)
    heldout = load_taught_rows(*given, "heldout", cached=cached, max_rows=config.eval_rows)
    begun = None if start is None else from_pretrained(start, target.config, fingerprint, dtype=torch.float32)
    if begun is None:
        tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
    else:
        tokens = begun.draft_tokens
    student = make_student(config, target, exit_layer, state.device, tokens, begun)
    say(describe(student, config, target.files, exit_layer))
    made = config.deciding() | {"exit_layer": exit_layer, "data_key": rows.key}
    made |= {} if start is None else {"start": read_meta(start).weights_sha256}
    known = asdict(fingerprint)
    if not reads_all:  # the local copy of a target on the Hub may have more files later
        known.pop("tensors")
    identity = {**made, "target": known, "trained_on": trained_on}

    def save(trained: Trained) -> None:
        facts = {**made, "fit": asdict(config.fit), "steps": trained.result.steps, "step": trained.step}
        facts |= {"metrics": trained.metrics, "training_seconds": trained.result.seconds}
        dtype = stored_dtype(target.config)
        save_pretrained(Path(config.out_dir), student.drafter, fingerprint, facts, dtype, trained_on)
        write_card_of(config, target.config, student, start, trained)

    return Training(
        student,
        rows,
        config.fit,
        identity,
        evaluation_of(config, target, heldout, student, active=state.is_main_process),
        save,
        finished=CARD_FILE,
        keeps_best=config.decode_prompts > 0,
        minutes=config.minutes,
    )


def make_student(
    config: EesdConfig,
    target: OpenTarget,
    exit_layer: int,
    device: torch.device,
    tokens: Tensor | None,
    begun: EarlyExit | None = None,
) -> EarlyExitStudent:
    """The student. begun: an early exit with this shape and draft vocabulary to continue from."""
    layers = None if config.online else exit_layers(target.config, exit_layer)
    model = target.layers(layers, dtype=frozen_dtype(config.frozen_dtype, device), device=device)
    student = student_on(model, config, exit_layer, None if tokens is None else tokens.to(device))
    if begun is not None:
        student.drafter.load_state_dict(begun.state_dict())
    return student


def student_on(model: PreTrainedModel, config: EesdConfig, exit_layer: int, tokens: Tensor | None) -> EarlyExitStudent:
    """A new exit with draft vocabulary `tokens` on the target layers `model`."""
    return EarlyExitStudent(
        model,
        exit_layer,
        train_head=config.train_head,
        train_layer=config.train_layer,
        depth=config.exit_depth,
        objective=config.loss,
        cached=config.teacher == "cached",
        draft_tokens=tokens,
    )


def describe(student: EarlyExitStudent, config: EesdConfig, files: TensorFiles, exit_layer: int) -> str:
    """One greppable line: bytes read, parameter counts, processes, objective, and the source of tau_analytic."""
    accept = "whole_target" if config.online or config.decode_prompts else "none"
    accept = "top_k_lower_bound" if accept == "none" and config.distils else accept
    trained, frozen = parameters_of(student)
    return (
        f"eesd exit_layer={exit_layer} read_bytes={files.bytes_read} read_tensors={files.tensors_read}/"
        f"{len(files.file_of)} trained_parameters={trained} frozen_parameters={frozen} "
        f"processes={PartialState().num_processes} objective={config.objective} tau_analytic={accept}"
    )


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

    def judged(batch: Batch, accept: AcceptanceOf | None) -> tuple[Tensor, Tensor | None]:
        return student.judged(**{key: value.to(device) for key, value in batch.items()}, accept=accept)

    def judge(_: EarlyExitStudent) -> Metrics:
        return text.judge(judged)

    def decode(_: EarlyExitStudent) -> Metrics:
        return {} if whole is None else decode_student(student, whole, decoding)

    return evaluation(student, stored_dtype(target.config), judge, decode)


def decode_student(student: EarlyExitStudent, stack: LayerStack, decoding: Decoding) -> Metrics:
    """Metrics of real decoding by the whole target with the student's drafter."""
    shared = {id(head): head for head in student.drafter.shared_head}  # the target's, which must not be copied
    drafter = copy.deepcopy(student.drafter, shared).to(stack.dtype).requires_grad_(False)
    prepare_drafters(stack, {EARLY_EXIT.name: drafter})
    return decoding(stack, EarlyExitSource(drafter))


def write_card_of(
    config: EesdConfig, target: PreTrainedConfig, student: EarlyExitStudent, start: str | None, trained: Trained
) -> None:
    """Write the card of the saved drafter, and say that it is saved."""
    names, tokens = ("exit_layer", "exit_depth", "train_head", "seq_len"), student.drafter.draft_tokens
    facts: dict[str, object] = {name: getattr(config, name) for name in names}
    facts |= {"objective": config.loss} | ({"teacher": config.teacher} if config.distils else {})
    facts |= {} if start is None else {"went on from": Path(start).name}
    facts |= {} if tokens is None else {"tokens": f"{len(tokens)} of the target's {target.vocab_size}"}
    facts |= {"data": config.data.source, "steps": trained.result.steps}
    if config.decode_prompts:
        facts |= {"chosen step": trained.step, "tau": round(trained.metrics["tau"], 3)}
    elif "tau_analytic" in trained.metrics:
        facts |= {"tau_analytic": round(trained.metrics["tau_analytic"], 3)}
    write_card(Path(config.out_dir), USE, config.target, facts)
    layers = f"{config.exit_layer} of {target.num_hidden_layers}"
    say(f"saved drafter={Path(config.out_dir)} exit_layer={layers} step={trained.step}")


def plan_of(config: EesdConfig, target: PreTrainedConfig, exit_layer: int) -> str:
    """What a training reads, trains and holds, as text."""
    student, read = empty_student(config, target, exit_layer)
    facts = {"exit_layer": f"{exit_layer}/{target.num_hidden_layers}", "read_parameters": read}
    facts |= {"read_gb": f"{read * stored_dtype(target).itemsize / GB:.2f}"}
    facts |= {"trained_parameters": parameters_of(student)[0]}
    return describe_memory(memory_of(config, target, student), planned_device(), **facts)


def empty_student(config: EesdConfig, target: PreTrainedConfig, exit_layer: int) -> tuple[EarlyExitStudent, int]:
    """The student without weights, in the dtypes that it has here, and the number of values that are read for it."""
    layers = range(target.num_hidden_layers) if config.online else exit_layers(target, exit_layer)
    model = nn.Module.to(empty_layers(target, layers), frozen_dtype(config.frozen_dtype, planned_device()))
    if target.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    stored = {id(one): one.numel() for one in model.state_dict(keep_vars=True).values()}  # tied ones once
    size = config.draft_vocabulary
    tokens = None if size is None else torch.empty(size, dtype=torch.long, device="meta")
    return student_on(model, config, exit_layer, tokens), sum(stored.values())


def memory_of(config: EesdConfig, target: PreTrainedConfig, student: EarlyExitStudent) -> list[Held]:
    """Of each device in a training of `student`, which may have no weights."""
    read, device = target.hidden_size, planned_device()
    held = fit_memory(student, config.fit, config.seq_len, read, target.vocab_size, device)
    if config.decode_prompts:  # in addition to the student, in the dtype for serving
        place = Place.of("auto", target, context_limit(target), device)
        whole = weight_bytes(target, place) + cache_bytes(target, place)
        held.append(Held("the whole target, to decode with", whole, "decode_prompts=0"))
    return held

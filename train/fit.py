"""The one training loop: `transformers.Trainer`, thinly subclassed.

Trainer brings accumulation, mixed precision over float32 masters, processes and launchers. Added here: a
loss normalised by the supervised tokens of the whole global batch, checkpoints that are complete or absent
and hold only what is trained, a data order that is a pure function of (seed, epoch), and one line per
logging step.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from accelerate.utils import save_fsdp_optimizer
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

from draft_models.losses import IGNORE
from outrider.errors import UserError
from outrider.files import write_json
from outrider.processes import from_main, join_processes
from train import run_dir, sharding
from train.fit_settings import FitConfig
from train.optimizers import build_optimizer
from train.progress import Report
from train.row_order import RowOrder
from train.trained_weights import load_trained, save_trained
from train.trainer_state import last_metrics, read_trainer_state

Evaluate = Callable[[nn.Module, int], dict[str, float]]


@dataclass(frozen=True)
class FitResult:
    """What a run came to. `metrics` is the last evaluation, by name, empty without one."""

    steps: int
    resumed_from: int  # 0: from the beginning
    metrics: dict[str, float]

    @property
    def was_finished(self) -> bool:
        """Whether there was nothing left to do: the weights are those of an earlier call."""
        return self.resumed_from == self.steps


class Rows(Protocol):
    """What `fit` needs of a data set: `data_prep.text.rows.Rows`, or anything that maps like it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


def fit(
    model: nn.Module,
    rows: Rows,
    config: FitConfig,
    out_dir: Path,
    *,
    resume: bool = False,
    identity: Mapping[str, Any] | None = None,
    evaluate: Evaluate | None = None,
    on_step: Callable[[int], None] | None = None,
) -> FitResult:
    """Train `model` in place on `rows`; call it on every process.

    model: `forward(**row batch)` returns {"loss_sum": scalar}, the loss SUMMED over the supervised
    positions (labels != IGNORE); the loop divides by their number in the global batch. Only parameters that
    require a gradient are trained, saved and restored.
    identity: JSON-able, what besides `config` decides the result (data, model, their seeds); a resumed run
    must agree on it. That the code is another version's is warned about, and recorded in every checkpoint.
    evaluate: called with the model in eval mode, without gradients, and the steps it has been trained for, on every
    process, every `eval_every` steps and at the end; its numbers are logged as eval_<name>.
    on_step: told, on every process, the number (from 0) of each optimizer step before it begins.

    Leaves in `out_dir`, which the caller keeps other runs out of: checkpoint-<step> directories and log.jsonl. A
    killed run continued with `resume=True` ends with the bits of an uninterrupted one (same machine, same number of
    processes). Raises `UserError` when the loss stops being finite, when a batch has no supervised token, and when a
    checkpoint cannot be written.
    """
    if not len(rows):
        raise UserError("data: no rows to train on; check the data set, its split and the length limits")
    state = join_processes()
    total = config.total_steps(len(rows))
    run = {"steps": total, "rows": len(rows), "fit": config.deciding(), **(identity or {})}
    arguments = _arguments(config, total, out_dir)
    start = run_dir.open_run(out_dir, run, resume)
    run["code"] = run_dir.code_of(start)
    staging = from_main(state, lambda: run_dir.own_staging(out_dir))
    state.wait_for_everyone()  # nobody writes before everybody has looked

    if start is not None and run_dir.step_of(start) == total:
        load_trained(model, start)
        return FitResult(total, total, last_metrics(start))

    if start is not None:
        read_trainer_state(start)
    if config.gradient_checkpointing:
        _enable_gradient_checkpointing(model)
    sharding.mark_layers(model)
    resumed_from = 0 if start is None else run_dir.step_of(start)
    if state.is_main_process:
        shutil.rmtree(out_dir / run_dir.STAGING, ignore_errors=True)  # of runs that were killed
    trainer = _FitTrainer(model, rows, config, arguments, run, staging, resumed_from, evaluate, on_step)
    with _autocast(model, config.precision, arguments.device.type):
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
    sharding.make_whole(model)
    return FitResult(total, resumed_from, trainer.metrics)


class _FitTrainer(Trainer):
    def __init__(
        self,
        model: nn.Module,
        rows: Rows,
        config: FitConfig,
        arguments: TrainingArguments,
        run: dict[str, Any],
        staging: Path,
        resumed_from: int,
        evaluate: Evaluate | None,
        on_step: Callable[[int], None] | None,
    ) -> None:
        self.fitted, self.rows, self.config = model, rows, config
        self.out_dir, self.run, self.evaluate_model = Path(arguments.output_dir or "."), run, evaluate
        self.staging = staging  # the main process's, for all
        self.metrics: dict[str, float] = {}
        self.resumed_from = resumed_from
        schedule = _Schedule(config, evaluate, on_step)
        super().__init__(model=model, args=arguments, train_dataset=rows, callbacks=[schedule])
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = True  # so that Trainer counts the global batch's supervised tokens
        self.loss_is_scaled_for_ga = True
        self._items: Tensor | int | None = None  # supervised tokens of the current global batch
        self._interval: list[Tensor] = []  # [summed loss, supervised tokens, tokens] since the last log line
        self._interval_start = self._train_start = time.perf_counter()
        self.add_callback(Report(self.out_dir, config.wandb, run))

    def get_train_dataloader(self) -> DataLoader:
        length = self.args.max_steps * self.config.batch_rows
        order = RowOrder(len(self.rows), length, self.config.seed)
        loader: DataLoader = DataLoader(
            self.rows,  # type: ignore[arg-type]
            batch_size=self.args.train_batch_size,
            sampler=order,
            collate_fn=default_collate,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def _prepare_for_training(self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: Any) -> Any:
        if resume_from_checkpoint is None or not self.is_deepspeed_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        # Trainer insists on finding the frozen weights in the checkpoint too.
        engine: Any = self.model_wrapped
        engine.load_checkpoint(resume_from_checkpoint, load_module_strict=False)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.config.optimizer == "muon" and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            raise UserError("optimizer=muon: works on whole matrices; use adamw with DeepSpeed and FSDP, or DDP")
        self.optimizer = build_optimizer(model or self.fitted, self.config)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LambdaLR:
        def scale(step: int) -> float:
            return self.config.lr_scale(step, num_training_steps)

        scheduled = optimizer or self.optimizer
        assert scheduled is not None
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, scale)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        outputs = model(**inputs)
        summed = outputs["loss_sum"]
        supervised = (inputs["labels"] != IGNORE).sum()
        tokens = torch.full_like(supervised, inputs["labels"].numel())
        self._interval.append(torch.stack([summed.detach().double(), supervised.double(), tokens.double()]))
        # Processes' gradients are averaged; the factor makes that the sum.
        loss = summed * self.args.world_size / num_items_in_batch
        self._items = num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Norm and token count are those of the global batch, the same on every process: all of them stop
        # together, and before the update, so neither the weights nor a checkpoint are touched.
        norm = super()._get_grad_norm(model, grad_norm)  # None where the engine knows it only after the step
        if self._items == 0 or not math.isfinite(norm or 0.0):
            self._stop(norm)
        return norm

    def _stop(self, norm: Any) -> NoReturn:
        step = self.state.global_step + 1
        summed, supervised, _ = self._drain()
        if self._items == 0:
            raise UserError(
                f"step {step}: no supervised token in the batch (every label is {IGNORE}); check the layout, "
                "the chat template and the length limits of the data"
            )
        raise UserError(
            f"step {step}: loss={summed / supervised:.4g}, grad_norm={float(norm):.4g} is not finite; stopped "
            f"before the update; {self._kept()}. Lower lr, raise warmup, or use precision=fp32"
        )

    def _kept(self) -> str:
        kept = run_dir.checkpoints(self.out_dir)
        return f"{kept[-1].name} is intact" if kept else "there is no checkpoint yet"

    def _drain(self) -> tuple[float, float, float]:
        """Sums of [loss, supervised tokens, tokens] over all processes since the last call."""
        local = torch.stack(self._interval).sum(0)
        self._interval.clear()
        return tuple(self.accelerator.reduce(local, "sum").tolist())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = self._interval_logs(logs)
        elif not any(key.startswith("eval_") for key in logs):
            return  # Trainer's closing summary: nothing the lines above have not said
        super().log(logs, start_time)

    def _interval_logs(self, logs: dict[str, float]) -> dict[str, float]:
        summed, supervised, tokens = self._drain()
        now = time.perf_counter()
        done = self.state.global_step - self.resumed_from
        left = self.state.max_steps - self.state.global_step
        interval, self._interval_start = now - self._interval_start, now
        norm = {"grad_norm": logs["grad_norm"]} if "grad_norm" in logs else {}
        return {
            "loss": summed / supervised,
            "lr": logs["learning_rate"],
            "tokens_per_s": tokens / interval,
            **norm,
            "eta": (now - self._train_start) / done * left,
        }

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        began = time.perf_counter()
        assert self.evaluate_model is not None
        self.fitted.eval()
        with torch.no_grad(), sharding.whole(self.fitted, self.model_wrapped):
            self.metrics = self.evaluate_model(self.fitted, self.state.global_step)
        self.fitted.train()
        named = {f"eval_{key}": value for key, value in self.metrics.items()}
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        self._interval_start += time.perf_counter() - began
        return named

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.staging)  # the only thing Trainer asks it for: saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        began = time.perf_counter()
        final = self.out_dir / f"checkpoint-{self.state.global_step}"
        staged = self.staging / final.name
        if self.args.should_save:
            shutil.rmtree(self.staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                write_json(staged / run_dir.RUN_FILE, self.run)
                run_dir.publish(staged, final, self.config.keep_checkpoints)
        except (OSError, SafetensorError, RuntimeError, UserError) as error:
            run_dir.drop_staging(self.staging)
            raise UserError(
                f"out_dir={self.out_dir}: the checkpoint of step {self.state.global_step} could not be written "
                f"({error}); {self._kept()}. Free space and continue with resume=true"
            ) from error
        self.accelerator.wait_for_everyone()
        self._interval_start += time.perf_counter() - began

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        assert output_dir is not None
        save_trained(self.fitted, Path(output_dir), self.args.should_save)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # By itself Trainer has both engines save the frozen weights as well.
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
            if self.args.should_save:
                assert self.lr_scheduler is not None
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
            return
        if self.is_deepspeed_enabled:
            engine: Any = self.model_wrapped
            engine.save_checkpoint = partial(type(engine).save_checkpoint, engine, exclude_frozen_parameters=True)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_trained(model or self.fitted, Path(resume_from_checkpoint))


class _Schedule(TrainerCallback):
    """When to evaluate; and a resumed run logs and saves as it is told now, not as the checkpoint was."""

    def __init__(self, config: FitConfig, evaluate: Evaluate | None, on_step: Callable[[int], None] | None) -> None:
        self.every, self.active, self.on_step = config.eval_every, evaluate is not None, on_step

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if self.on_step is not None:
            self.on_step(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        last = state.global_step == state.max_steps
        due = self.every is not None and state.global_step % self.every == 0
        control.should_evaluate = self.active and (due or last)
        control.should_log = control.should_log or last


@contextmanager
def _autocast(model: nn.Module, precision: str, device: str) -> Iterator[None]:
    """`model.forward` in bf16 over float32 masters, whatever trains it.

    Not Trainer's bf16: DeepSpeed and FSDP take that for weights in bf16.
    """
    if precision == "bf16":
        model.forward = torch.autocast(device, dtype=torch.bfloat16)(model.forward)
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)


def _enable_gradient_checkpointing(model: nn.Module) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UserError("gradient_checkpointing=true: this model does not support it")
    enable()


def _arguments(config: FitConfig, total: int, out_dir: Path) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(out_dir),
        max_steps=total,
        learning_rate=config.lr,
        max_grad_norm=config.max_grad_norm,
        use_cpu=not cuda,
        logging_steps=config.log_every,
        save_strategy="steps",
        save_steps=config.save_every or total,
        seed=config.seed,
        average_tokens_across_devices=True,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=cuda,
        remove_unused_columns=False,
        label_names=["labels"],
        logging_nan_inf_filter=False,  # it hides a bad loss; `_get_grad_norm` stops instead
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    # One process drives one device: on a machine with several GPUs Trainer would wrap the model in DataParallel.
    _ = arguments.device
    arguments._n_gpu = min(1, arguments.n_gpu)
    micro = config.micro_rows(arguments.world_size)
    arguments.per_device_train_batch_size = micro
    arguments.gradient_accumulation_steps = config.batch_rows // (micro * arguments.world_size)
    return arguments

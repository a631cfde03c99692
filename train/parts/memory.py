"""The memory that a training takes on a device, computed from shapes: `plan=true` prints it without reading weights."""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.draft_models.acceptance import FLOAT32_BYTES
from outrider.draft_models.losses import loss_bytes
from outrider.draft_models.targets.model_files import empty_layers, empty_model
from outrider.draft_models.targets.model_spec import context_limit
from outrider.inference.loading.memory_plan import Memory, Storage, cache_bytes, planned_device, weight_bytes
from outrider.train.core.optimizers import layer_matrices
from outrider.train.core.sharding import trained_parameters
from outrider.train.parts.drafter import frozen_dtype
from outrider.train.parts.parallel import Parallel
from outrider.train.settings.drafters import DrafterTraining, EesdConfig, HeadConfig
from outrider.train.settings.fit import FitConfig

PROGRAM_BYTES = 600_000_000  # of Python, torch and transformers, in the memory of a CPU


def fit_memory(
    config: DrafterTraining, student: nn.Module, read: int, vocab_size: int, through: nn.Module | None = None
) -> list[Memory]:
    """The memory in bytes of training `student` (it may be on meta): its state, and what a step keeps for backward.

    read: numbers per token in the hidden states that the frozen layers hand over. through: frozen layers that gradients
    run through. A student with `steps` runs its layers that many times.
    """
    fit, device, matrix_ids = config.fit, planned_device(), {id(matrix) for matrix in layer_matrices(student)}
    rows, parallel = fit.micro_batch_rows or fit.batch_rows, Parallel(tokens=getattr(config, "parallel", 0) or 1)
    tokens = round(config.seq_len * parallel.expected_predictions)  # positions of a row, with masks after its text
    frozen_bytes = sum(p.nbytes for p in student.parameters() if not p.requires_grad)
    trained = trained_parameters(student).values()
    outer_sizes = [p.numel() for p in trained if p.ndim == 2 and id(p) not in matrix_ids]  # of embeddings and heads
    step_bytes = rows * tokens * FLOAT32_BYTES * _activation_numbers(student, read, fit.gradient_checkpointing, through)
    memories = [  # what it is, its bytes, and the option that makes it smaller
        Memory("frozen weights", frozen_bytes, "frozen_dtype=bfloat16"),
        Memory("trained: masters, gradients, moments", _state_bytes(student, fit),
               "train_head=false, draft_vocabulary or fit.optimizer=muon"),
        Memory(f"activations of {rows} rows × {tokens} tokens", step_bytes,
               "fit.micro_batch_rows=1, seq_len or fit.gradient_checkpointing=true"),
        Memory("logits and the loss, some rows at a time", loss_bytes(vocab_size, vocab_size, device)),
        Memory("a matrix's gradient in the loss", FLOAT32_BYTES * max(outer_sizes, default=0)),
    ]  # fmt: skip
    return [*memories, *([Memory("the program", PROGRAM_BYTES)] if device.type == "cpu" else [])]


def _state_bytes(student: nn.Module, fit: FitConfig) -> int:
    """The bytes of master weights, gradients and two moments; Muon has one moment of a layer's matrix."""
    muon_numel = sum(matrix.numel() for matrix in layer_matrices(student)) if fit.optimizer == "muon" else 0
    return FLOAT32_BYTES * (4 * sum(p.numel() for p in trained_parameters(student).values()) - muon_numel)


def _activation_numbers(student: nn.Module, read: int, recomputes: bool, through: nn.Module | None) -> int:
    """The numbers per token that a step keeps for the backward pass. recomputes: gradient checkpointing is on.

    For each matrix they are the input and the output of its product, and half as much between products: norms,
    attention, the MLP's own product. Matrices of frozen layers that gradients run through count alike.
    """
    if through is not None:
        # 3/4 is half of the 3/2 that the student's own matrices count below: `read` is doubled there.
        read += 3 * sum(sum(matrix.shape) for matrix in through.parameters() if matrix.ndim == 2) // 4
    matrices = layer_matrices(student)
    inner_count = 0 if recomputes else 3 * sum(sum(matrix.shape) for matrix in matrices) // 2
    out_count = 5 * max((min(matrix.shape) for matrix in matrices), default=0)  # outputs, predictions, keys, values
    return 2 * read + getattr(student, "steps", 1) * (out_count + inner_count)


def decoding_target(config: EesdConfig, target_config: PreTrainedConfig) -> Memory:
    """The whole target, which decodes held-out prompts beside a student on its first layers."""
    storage = Storage(frozen_dtype(config.frozen_dtype, planned_device()).itemsize, context_limit(target_config))
    nbytes = weight_bytes(target_config, storage) + cache_bytes(target_config, storage)
    return Memory("the whole target, to decode with", nbytes, "decode_prompts=0")


def empty_target(
    config: EesdConfig | HeadConfig, target_config: PreTrainedConfig, layer_ids: list[int] | None = None
) -> tuple[PreTrainedModel, int]:
    """The frozen layers (None: all) of a target without weights, and the number of values that are stored for them."""
    model = empty_model(target_config) if layer_ids is None else empty_layers(target_config, layer_ids)
    model = nn.Module.to(model, frozen_dtype(config.frozen_dtype, planned_device()))  # PreTrainedModel's has no type
    if target_config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    # By identity, so that tied weights count once.
    numel_by_id = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}
    return model, sum(numel_by_id.values())

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
from outrider.train.settings.drafters import DrafterTraining, Eagle3Config, EesdConfig

PROGRAM_BYTES = 600_000_000  # of Python, torch and transformers, in the memory of a CPU


def fit_memory(
    config: DrafterTraining, student: nn.Module, read: int, vocabulary: int, through: nn.Module | None = None
) -> list[Memory]:
    """The memory of training `student` (it may be on meta): its state, and what a step keeps for backward.

    read: numbers per token in the hidden states that the frozen layers hand over. through: frozen layers that gradients
    run through. A student with `steps` runs its layers that many times.
    """
    if through is not None:
        read += 3 * sum(sum(matrix.shape) for matrix in through.parameters() if matrix.ndim == 2) // 4
    fit, device, matrices = config.fit, planned_device(), layer_matrices(student)
    width = round(config.seq_len * Parallel.of(getattr(config, "parallel", 0)).predictions)
    rows, inner = fit.micro_batch_rows or fit.batch_rows, {id(matrix) for matrix in matrices}
    frozen = sum(p.nbytes for p in student.parameters() if not p.requires_grad)
    muon = sum(matrix.numel() for matrix in matrices) if fit.optimizer == "muon" else 0  # which has one moment
    trained = trained_parameters(student).values()
    state = FLOAT32_BYTES * (4 * sum(p.numel() for p in trained) - muon)
    loose = [p.numel() for p in trained if p.ndim == 2 and id(p) not in inner]
    steps = getattr(student, "steps", 1)
    handed_on = 5 * max((min(matrix.shape) for matrix in matrices), default=0)  # outputs, predictions, keys, values
    # inputs and outputs of its products, and half as much between them: norms, attention, the MLP's own product
    inside = 0 if fit.gradient_checkpointing else 3 * sum(sum(matrix.shape) for matrix in matrices) // 2
    parts = [
        Memory("frozen weights", frozen, "frozen_dtype=bfloat16"),
        Memory(
            "trained: masters, gradients, moments", state, "train_head=false, draft_vocabulary or fit.optimizer=muon"
        ),
        Memory(
            f"activations of {rows} rows × {width} tokens",
            rows * width * FLOAT32_BYTES * (2 * read + steps * (handed_on + inside)),
            "fit.micro_batch_rows=1, seq_len or fit.gradient_checkpointing=true",
        ),
        Memory("logits and the loss, some rows at a time", loss_bytes(vocabulary, vocabulary, device)),
        Memory("a matrix's gradient in the loss", FLOAT32_BYTES * max(loose, default=0)),
    ]
    return [*parts, *([Memory("the program", PROGRAM_BYTES)] if device.type == "cpu" else [])]


def decoding_target(target: PreTrainedConfig) -> Memory:
    """The whole target, which decodes held-out prompts beside a student on its first layers, in the dtype to serve."""
    storage = Storage.of("auto", target, context_limit(target), planned_device())
    size = weight_bytes(target, storage) + cache_bytes(target, storage)
    return Memory("the whole target, to decode with", size, "decode_prompts=0")


def empty_target(
    config: EesdConfig | Eagle3Config, target: PreTrainedConfig, layers: list[int] | None = None
) -> tuple[PreTrainedModel, int]:
    """The frozen layers (None: all) of a target without weights, and the number of values that are stored for them."""
    model = empty_model(target) if layers is None else empty_layers(target, layers)
    model = nn.Module.to(model, frozen_dtype(config.frozen_dtype, planned_device()))
    if target.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    stored = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}  # tied ones once
    return model, sum(stored.values())

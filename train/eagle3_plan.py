"""What an EAGLE-3 training would hold, from configs alone: no weight is read."""

from collections.abc import Iterable
from math import prod

from torch import Tensor
from transformers import PreTrainedConfig

from draft_models.eagle3.checkpoint import head_shapes
from draft_models.eagle3.reading import Reading
from draft_models.losses import OVERLAPS
from draft_models.targets.empty_models import empty_model
from inference.loading.memory_plan import GB, planned_device
from train.eagle3_settings import Eagle3Config
from train.eagle3_student import rows_at_once
from train.plan import BYTES_PER_TRAINED, frozen_dtype

CHUNK_COPIES = 6  # of a chunk's logits, that a loss makes of them on the way


def describe_plan(config: Eagle3Config, reading: Reading, target: PreTrainedConfig) -> str:
    """A greppable line, and one for each part of what a device holds."""
    model = empty_model(target)
    device = planned_device()
    width = frozen_dtype(config.frozen_dtype, device).itemsize
    whole = _count({id(p): p for p in model.parameters()}.values())
    shapes = head_shapes(reading)
    every, matrix = sum(map(prod, shapes.values())), prod(shapes["lm_head.weight"])
    own = prod(shapes.get("embed_tokens.weight", (0,)))
    trained = every - own - (0 if config.train_head else matrix)
    rows = config.fit.micro_batch_rows or config.fit.batch_rows
    tokens = rows * config.seq_len
    columns = reading.vocabulary if config.objective in OVERLAPS else reading.draft_vocabulary
    logits = 4 * rows_at_once(reading, config.objective) * columns
    memory = {
        "the target's weights": width * whole,
        "trained: masters, gradients, moments": BYTES_PER_TRAINED * trained + 4 * (every - trained),
        f"activations of {rows} rows × {config.seq_len} tokens × {config.draft_steps} steps": tokens
        * kept_bytes(config, reading),
        "logits, a chunk at a time": CHUNK_COPIES * logits,
    }
    lines = [
        f"plan taps={','.join(map(str, reading.taps))} draft_steps={config.draft_steps} trained_parameters={trained} "
        f"frozen_parameters={whole} device_gb={sum(memory.values()) / GB:.2f} "
        f"device={device}"
    ]
    return "\n".join([*lines, *(f"  memory, {name}: {size / GB:.2f} GB" for name, size in memory.items())])


def kept_bytes(config: Eagle3Config, reading: Reading) -> int:
    """About how many bytes of a token all steps keep for the backward pass."""
    width, heads, keys = reading.hidden, reading.heads * reading.head_dim, reading.key_heads * reading.head_dim
    taps = 4 * len(reading.taps) * reading.target_hidden
    handed_on = 3 * 4 * width + 2 * 4 * keys  # a step's output, its guesses with their gradient, keys and values
    inside = (
        0 if config.fit.gradient_checkpointing else 4 * (12 * width + 4 * heads + 4 * keys + 5 * reading.intermediate)
    )
    return 2 * taps + config.draft_steps * (handed_on + inside)


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)

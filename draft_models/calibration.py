"""EESD's calibration head: how likely is the token just drafted to be right? And its file in the drafter's directory.

The paper has it for early exits. It reads a hidden state of any drafter that has one: an early exit's, a small LM's
last one, what an EAGLE-3 head gives for its next step.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from draft_models.target.model_identity import model_differences, model_identity
from draft_models.target.tensor_files import TensorFiles
from outrider.errors import UserError, warn
from outrider.files import read_json, write_atomically, write_json

POSITIONS = 10  # draft positions with weights of their own; later ones share the last
WEIGHTS_FILE, META_FILE = "calibration.safetensors", "calibration.json"
FORMAT = 2  # 1, which says nothing of it: heads that see no probability
SURE = 12.0  # the largest log-odds that are told apart


class CalibrationHead(nn.Module):
    """θ_M = sigmoid(W_p [W^i H_t^(T) ; H_{t+i}^(D)]), EESD §3.3, as a logit.

    H_t^(T) [d_T]: the target's last hidden state at the last verified position. H_{t+i}^(D) [d_D]: the drafter's at
    draft position i. W_p is [1, d_T + d_D], W^i is [d_T, d_T] with i = min(i, 10).

    Nothing stands between W_p and W^i, so the two make one vector per position, w_T W^i. Stored as `target` [10, d_T],
    it makes θ_M cost two dot products. `bias` [10] is per position too. Inputs are detached: the head never trains what
    feeds it.

    Beyond the paper it sees how likely the draft found its own token: `odds` [] weighs the log-odds log(q / (1 − q)).
    `temperature` [10], by position, divides the logit (see train/sequential_temperature.py).
    """

    temperature: Tensor

    def __init__(self, target_width: int, draft_width: int):
        super().__init__()
        self.target = nn.Parameter(torch.zeros(POSITIONS, target_width))
        self.draft = nn.Parameter(torch.zeros(draft_width))
        self.bias = nn.Parameter(torch.zeros(POSITIONS))
        self.odds = nn.Parameter(torch.zeros(()))
        self.register_buffer("temperature", torch.ones(POSITIONS))

    def forward(self, target_hidden: Tensor, draft_hidden: Tensor, position: Tensor, log_probability: Tensor) -> Tensor:
        """Logits [n] for target_hidden [n, d_T], draft_hidden [n, d_D], draft positions [n], counted from 1, and the
        draft's log q [n] of its tokens."""
        return self.weigh(target_hidden, draft_hidden, position, log_odds(log_probability.detach()))

    def weigh(self, target_hidden: Tensor, draft_hidden: Tensor, position: Tensor, odds: Tensor) -> Tensor:
        """The same for the draft's log-odds [n]."""
        index = position.clamp(1, POSITIONS) - 1
        seen = (self.target[index] * target_hidden.detach().to(self.target.dtype)).sum(-1)
        seen = seen + draft_hidden.detach().to(self.draft.dtype) @ self.draft + self.bias[index] + self.odds * odds
        return seen / self.temperature[index]


def log_odds(log_probability: Tensor) -> Tensor:
    """log(q / (1 − q)) of log q, within ± `SURE`: where q is 0 or 1 in floating point too."""
    below = log_probability.float().clamp(max=-1e-6)
    return (below - (-below.expm1()).log()).clamp(-SURE, SURE)


def drafter_digest(files: TensorFiles, reading: Mapping[str, Any] | None = None) -> str:
    """What a head is bound to where a drafter's weights carry no digest: config and a sample of every tensor.

    reading: what is changed of how an EAGLE-3 head is read, as it then drafts otherwise. Raises `UserError` where the
    weights cannot be read.
    """
    facts = {**model_identity(files), **({"reading": reading} if reading else {})}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def save_calibration(path: Path, head: CalibrationHead, drafter_sha256: str, facts: Mapping[str, Any]) -> None:
    """Store `head` in the directory `path`, the drafter's or one in it, bound to weights of digest `drafter_sha256`.

    facts: how it was made and how good it is; kept as it is. A crash leaves the previous head or none.
    """
    blob = save({name: value.detach().float().cpu().contiguous() for name, value in head.state_dict().items()})
    meta = {
        **facts,
        "format": FORMAT,
        "drafter_sha256": drafter_sha256,
        "weights_sha256": hashlib.sha256(blob).hexdigest(),
    }
    write_atomically(path / WEIGHTS_FILE, blob)
    write_json(path / META_FILE, meta)


def load_calibration(
    path: Path | str,
    drafter_sha256: str,
    device: torch.device | str = "cpu",
    target: Mapping[str, Any] | None = None,
    *,
    hidden_size: int | None = None,
    folder: str = "",
) -> CalibrationHead:
    """The head stored in the drafter's directory `path`, or in that `folder` of it, in float32.

    target: the `model_identity` of the target it is to calibrate for. hidden_size: the width of target and drafter,
    where they are of one.

    Raises `UserError` when there is no head; when it was trained on other weights than `drafter_sha256`, or on another
    target; when it is of another width; when its files are damaged. Earlier versions did not record the target: a
    warning then says that it is not checked.
    """
    remedy = f"run train/calibrate.py checkpoint={path}"
    weights_file, meta_file = (Path(path) / folder / name for name in (WEIGHTS_FILE, META_FILE))
    try:
        blob = weights_file.read_bytes()
    except OSError as error:
        raise UserError(f"checkpoint={path}: no calibration head there ({error.strerror}); {remedy}") from None
    meta = read_json(meta_file, "description of a calibration head", remedy)
    if not isinstance(meta, dict) or not {"drafter_sha256", "weights_sha256"} <= meta.keys():
        raise UserError(f"{meta_file}: damaged (it names no digests); {remedy}")
    if meta.get("format", 1) not in range(1, FORMAT + 1):
        raise UserError(f"checkpoint={path}: its calibration head has the unknown format {meta['format']}; {remedy}")
    if meta["drafter_sha256"] != drafter_sha256:
        raise UserError(f"checkpoint={path}: its calibration head belongs to an earlier training; {remedy}")
    made_on = meta.get("target")
    if made_on is not None and not _is_identity(made_on):
        raise UserError(f"{meta_file}: does not say for which target; {remedy}")
    if made_on is not None and target is not None and (wrong := model_differences(made_on, target)):
        raise UserError(f"checkpoint={path}: its calibration head is of another target: {'; '.join(wrong)}; {remedy}")
    if made_on is None and target is not None:
        warn(f"checkpoint={path}: its calibration head was made when targets were not recorded, so its is not checked")
    if hashlib.sha256(blob).hexdigest() != meta.get("weights_sha256"):
        raise UserError(f"{weights_file}: truncated or altered; {remedy}")
    try:
        weights = load(blob)
        head = CalibrationHead(weights["target"].shape[1], weights["draft"].shape[0])
        if meta.get("format", 1) == 1:  # the defaults: it sees no probability
            weights = {**weights, "odds": head.odds.detach(), "temperature": head.temperature}
        head.load_state_dict(weights)
    except (SafetensorError, KeyError, IndexError, RuntimeError) as error:
        raise UserError(f"{weights_file}: not a calibration head ({error}); {remedy}") from None
    widths = {head.target.shape[1], head.draft.shape[0]}
    if hidden_size is not None and widths != {hidden_size}:
        raise UserError(f"checkpoint={path}: a calibration head for another width than {hidden_size}; {remedy}")
    return head.to(device).requires_grad_(False)


def _is_identity(value: Any) -> bool:
    """Whether `value`, from JSON, has the form of a `model_identity`."""
    return isinstance(value, dict) and all(isinstance(value.get(part), dict) for part in ("config", "tensors"))

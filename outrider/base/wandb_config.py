"""The Weights & Biases settings of all commands that log there; does not import wandb."""

import netrc
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from outrider.base.errors import UserError
from outrider.base.settings import Named, Settings, opt
from outrider.base.words import read_secret

WandbMode = Literal["auto", "online", "offline", "disabled"]
ID_FILE = "wandb_run_id"


@dataclass(frozen=True)
class WandbConfig(Settings):
    """Weights & Biases, which is off by default."""

    mode: WandbMode = "disabled"
    """offline: written to disk; auto: as WANDB_MODE says, else online if a key is at hand (WANDB_API_KEY or netrc),
    else offline"""
    project: Annotated[str, Named("a project name")] = opt("outrider", "the W&B project")
    name: str | None = opt(None, "of the run there; null: W&B makes one up")

    def resolve_mode(self) -> str:
        """`online`, `offline` or `disabled`; the environment's WANDB_MODE decides for `auto` when set."""
        if self.mode != "auto":
            return self.mode
        if os.environ.get("WANDB_MODE") in get_args(WandbMode)[1:]:  # without "auto"
            return os.environ["WANDB_MODE"]
        return "online" if os.environ.get("WANDB_API_KEY") or _netrc_has_wandb() else "offline"

    def is_on(self) -> bool:
        """Whether anything is logged. Raises `UserError` if wandb is needed and missing, or its key is invalid."""
        is_enabled = self.resolve_mode() != "disabled"
        if is_enabled:
            read_secret("WANDB_API_KEY")
        if is_enabled and find_spec("wandb") is None:
            raise UserError("wandb.mode: wandb is not installed; pip install wandb, or disabled")
        return is_enabled

    def init_options(self, out_dir: Path) -> dict[str, Any]:
        """The arguments of `wandb.init` except the project; a run whose id is stored in `out_dir` is continued."""
        id_file = out_dir / ID_FILE
        run_id = id_file.read_text("utf-8").strip() if id_file.exists() else None
        mode_and_dir = {"mode": self.resolve_mode(), "dir": str(out_dir)}
        return {"name": self.name, **mode_and_dir, "id": run_id, "resume": "allow" if run_id else None}


def _netrc_has_wandb() -> bool:
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host in netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False

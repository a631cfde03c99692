"""debug=true: a dry run of a command on tiny random models, without network access."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from data_prep.text.given import read_some
from draft_models.targets.settings import TARGET, RehearsedConfig
from outrider.files import require_writable
from outrider.run_dirs import clear, rehearsal_folder, require_rehearsal

MODELS = "tiny_models"
Config = TypeVar("Config", bound=RehearsedConfig)


def rehearsable(run: Callable[[Config], None]) -> Callable[[Config], None]:
    """The command `run`; with debug=true it runs the settings `config.small` instead of `config`."""

    @functools.wraps(run)
    def whole(config: Config) -> None:
        if not config.debug:
            return run(config)
        with _rehearsal(config) as small:
            return run(small)

    return whole


@contextmanager
def _rehearsal(config: Config) -> Iterator[Config]:
    """The small settings of `config`, after making the models that they need.

    First the inputs given on the command line are checked (see `read_some`). The tiny models have the architecture of
    the given target. Everything is written to `<out_dir>-debug`, which is locked against other runs and, unless
    resume=true, emptied first. The run's out_dir is `run` in it. All processes of a launcher call this.

    Raises `UserError` if that folder has other content or is in use by another run, and for unusable inputs.
    """
    from draft_models.tiny.models import save_tiny_models  # torch, which some commands do without
    from outrider.processes import from_main, join_processes, only_run_of

    folder, state = rehearsal_folder(config.out_dir), join_processes()
    from_main(state, lambda: None if config.resume else require_rehearsal(folder, MODELS))
    models, out_dir = folder / MODELS, folder / "run"

    def prepare() -> None:
        target = read_some(config, config.gives)
        if not config.resume:
            clear(folder)
        like = None if config.gives("debug_architecture") else target
        architecture = save_tiny_models(models, config.debug_architecture, like)
        print(f"debug target={models / TARGET} architecture={architecture} out_dir={out_dir}", flush=True)

    with only_run_of(state, require_writable(folder), "a debug run"):
        from_main(state, prepare)
        yield replace(config, debug=False, out_dir=str(out_dir)).small(models)

"""From a target to a drafter, a report and exports for engines in one command, in the minutes that are given.

outrider auto target=MODEL prompts=prompts.jsonl minutes=30
"""

from outrider.commands import config_for, run_script
from outrider.train.settings.auto import AutoConfig


def make_drafter(config: AutoConfig) -> None:
    """Announce the command, then carry it out."""
    target = config.server or config.target
    print(f"auto target={target} minutes={config.minutes:g} out_dir={config.out_dir}: starting", flush=True)
    # Imported once the config is known to be good: torch takes seconds, on a busy machine a minute.
    from outrider.train.auto_run import run_auto

    run_auto(config, config_for)  # `config_for` makes the settings of the commands that are steps of the run


if __name__ == "__main__":
    run_script("auto")

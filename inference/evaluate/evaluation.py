"""evaluate-checkpoint: all methods (a drafter and how it drafts) over all prompts, in phases.

plan                  `begin_evaluation`: the target, the prompts and the drafters are checked, no weights are loaded
load, tune, measure   `measure_prompts`: the processes of a launcher share the prompts; the main process alone tunes
judge, write          `write_report`: the main process makes the report from the results that are stored
"""

import time
from collections.abc import Sequence

from outrider.data_prep.text.prompts import Prompt
from outrider.inference.core.rounds import Clock
from outrider.inference.evaluate.measuring import measure_prompts, open_queue
from outrider.inference.evaluate.planning import begin_evaluation, end_evaluation, run_on_prompts
from outrider.inference.evaluate.reporting import write_report
from outrider.inference.settings.evaluate import EvaluateConfig


def evaluate(config: EvaluateConfig) -> None:
    """Compare methods on the prompts that `config` names. Raises `UserError`."""
    run_on_prompts(config, evaluate_checkpoint)


def evaluate_checkpoint(config: EvaluateConfig, prompts: Sequence[Prompt], clock: Clock = time.perf_counter) -> None:
    """Compare the methods of `config` on `prompts` and write the report to `config.out_dir`.

    All processes of a launcher call this. Each measures its share of the prompts on its own device. With resume=true,
    prompts that were measured before are skipped. With `minutes`, the time by `clock` (in seconds) determines the
    number of prompts measured. If any method emitted other tokens than the target, every process exits with status 1
    after the report is written. Raises `UserError` for bad input, and if another run is using the directory.
    """
    with begin_evaluation(config, prompts, clock) as plan:
        lossy_methods = write_report(plan, measure_prompts(plan, open_queue(plan)))
    end_evaluation(plan, lossy_methods)

"""One process of a launcher: fits the tiny model, then does what commands.json in the folder says.

See test_two_processes.py. All in one launch, since starting it takes longer than all of its trainings.
"""

import json
from pathlib import Path

from tests.train import fit_job
from tests.train.sharded_job import run_command


def main(folder: str) -> None:
    fit_job.main(f"{folder}/fit", json.dumps({"micro_batch_rows": 2, "optimizer": "adamw"}), "0")
    for words in json.loads((Path(folder) / "commands.json").read_text()):
        run_command(*words)

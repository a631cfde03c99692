"""evaluate-checkpoint: a drafter checkpoint and prompts in, a report of losslessness and speed out."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("evaluate_checkpoint")

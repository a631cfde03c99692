"""Let the target answer the prompts of a data set; a drafter is then trained on the answers."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("generate_responses")

"""Write prompts for training and for evaluation: a target's own, or those of a file."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("write_prompts")

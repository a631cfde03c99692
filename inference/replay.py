"""replay: recorded greedy answers stand in for a target, and give the exact τ of drafters that read tokens only."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("replay")

"""Build the n-gram table of a corpus, for drafting without a draft model."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("build_trigrams")

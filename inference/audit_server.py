"""audit: are the answers of a server those of the target? Status 0 if they differ by rounding only, 1 for a fault."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("audit")

"""audit: are the answers of a server those of the target? Status 0 if they differ by rounding only, 1 for a fault."""

from outrider.commands import script

main = script("audit", "outrider.inference.audit.audit:audit")

if __name__ == "__main__":
    main()

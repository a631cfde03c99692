"""audit: are the answers of a server those of the target? Status 0 where they only round, 1 for a fault."""

from outrider.commands import script

main = script("audit", "outrider.inference.audit.audit:audit")

if __name__ == "__main__":
    main()

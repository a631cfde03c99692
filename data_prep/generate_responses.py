"""Let the target answer the prompts of a data set; a drafter is then trained on the answers."""

from outrider.commands import script

main = script("generate_responses", "outrider.inference.batch.generate:generate_responses")

if __name__ == "__main__":
    main()

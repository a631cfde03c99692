"""Write prompts for training and for evaluation: a target's own, or those of a file."""

from outrider.commands import script

main = script("write_prompts", "outrider.inference.batch.own_prompts:write_prompts")

if __name__ == "__main__":
    main()

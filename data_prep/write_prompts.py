"""Write chat prompts about the documentation of Python's library, for training and for evaluation."""

from outrider.commands import script

main = script("write_prompts", "outrider.data_prep.python_docs:write_prompts")

if __name__ == "__main__":
    main()

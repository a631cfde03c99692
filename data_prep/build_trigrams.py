"""Build the n-gram table of a corpus, for drafting without a draft model."""

from outrider.commands import script

main = script("build_trigrams", "outrider.data_prep.ngrams.building:build_table")

if __name__ == "__main__":
    main()

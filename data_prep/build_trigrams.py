"""Build the n-gram table of a corpus, for drafting without a draft model."""

from outrider.commands import entry
from outrider.data_prep.settings import TrigramConfig


@entry("build_trigrams", TrigramConfig)
def main(config: TrigramConfig) -> None:
    # Imported once the config is known to be good: compiled code takes a second.
    from outrider.data_prep.ngrams.building import build_table
    from outrider.inference.loading.rehearsal import rehearsable

    rehearsable(build_table)(config)


if __name__ == "__main__":
    main()

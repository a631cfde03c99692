"""Build the n-gram table of a corpus, for drafting without a draft model.

python data_prep/build_trigrams.py data=ultrachat tokenizer=MODEL out_dir=runs/trigrams
"""

from conf import entry
from data_prep.settings import TrigramConfig


@entry("build_trigrams", TrigramConfig)
def main(config: TrigramConfig) -> None:
    # Imported once the config is known to be good: compiled code takes a second.
    from data_prep.ngrams.counting import build_table

    if config.debug:  # nothing else here needs torch
        from data_prep.debug import small_table
        from draft_models.tiny_models import debugged

        with debugged(config, small_table) as small:
            return build_table(small)
    return build_table(config)


if __name__ == "__main__":
    main()

"""compare-reports: compares two finished evaluations, with intervals over the prompts that both measured."""

from outrider.commands import entry
from outrider.inference.settings.tools import CompareConfig


@entry("compare_reports", CompareConfig)
def main(config: CompareConfig) -> None:
    # Imported after the config is checked, as torch takes seconds to import.
    from outrider.inference.report.side_by_side import compare_reports

    compare_reports(config)


if __name__ == "__main__":
    main()

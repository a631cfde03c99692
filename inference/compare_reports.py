"""compare-reports: two finished evaluations side by side, with intervals over the prompts that both have measured.

python inference/compare_reports.py compare=[runs/a,runs/b]
"""

from conf import entry
from inference.settings.compare import CompareConfig


@entry("compare_reports", CompareConfig)
def main(config: CompareConfig) -> None:
    # Imported once the config is known to be good: torch takes seconds.
    from inference.report.side_by_side import compare_reports

    compare_reports(config)


if __name__ == "__main__":
    main()

"""compare-reports: compares two finished evaluations, with intervals over the prompts that both measured."""

from outrider.commands import script

main = script("compare_reports", "outrider.inference.report.comparison:compare_reports")

if __name__ == "__main__":
    main()

"""compare-reports: compares two finished evaluations, with intervals over the prompts that both measured."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("compare_reports")

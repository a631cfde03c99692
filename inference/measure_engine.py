"""measure-engine: what evaluate-checkpoint measures, and the same methods in a serving engine."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("measure_engine")

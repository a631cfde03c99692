"""Serve a target, accelerated by a drafter, to clients of OpenAI's API and to a browser."""

if __name__ == "__main__":
    from outrider.commands import run_script

    run_script("serve")

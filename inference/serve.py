"""Serve a target, accelerated by a drafter, to clients of OpenAI's API and to a browser."""

from outrider.commands import script

main = script("serve", "outrider.server.app:serve")

if __name__ == "__main__":
    main()

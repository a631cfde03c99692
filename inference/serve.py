"""Serve a target, accelerated by a drafter, to clients of OpenAI's API and to a browser."""

from outrider.base.errors import UserError
from outrider.commands import entry
from outrider.inference.settings.tools import ServeConfig


@entry("serve", ServeConfig)
def main(config: ServeConfig) -> None:
    # Imported once the config is known to be good: torch takes seconds, and a server's packages are an extra.
    try:
        from outrider.server.app import serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn"):
            raise
        raise UserError(f"serve needs {error.name}: pip install 'outrider[serve]'") from None

    serve(config)


if __name__ == "__main__":
    main()

"""Chat with a target in the terminal, accelerated by a drafter, and see the drafter's share of every answer."""

import sys

import outrider
from outrider.commands import entry
from outrider.inference.settings.tools import ChatConfig


@entry("chat", ChatConfig, waits=True)
def main(config: ChatConfig) -> None:
    # Imported after the config is checked, as torch and transformers take seconds to import.
    from outrider.inference.conversation import Chat, open_screen

    if sys.stdin.isatty():
        import readline  # noqa: F401  # enables line editing in `input`
    methods = iter(config.methods.items())
    name, method = next(methods, (None, None))
    model = outrider.load(
        config.checkpoint or str(config.target), method=method, name=name, revision=config.revision,
        small_lm=config.small_lm, eagle3=config.eagle3, table=config.table, dtype=config.dtype, device=config.device,
        runtime=config.runtime, template=config.template, target=config.target if config.checkpoint else None,
        conversations=config.system or True,
    )  # fmt: skip
    screen = open_screen(sys.stdout)
    try:
        Chat(model, config, screen, input).run()
    finally:
        screen.close()


if __name__ == "__main__":
    main()

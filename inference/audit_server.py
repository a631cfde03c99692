"""audit: are the answers of a server those of the target? Status 0 where they only round, 1 for a fault."""

from outrider.commands import entry
from outrider.inference.settings.tools import AuditConfig


@entry("audit", AuditConfig)
def main(config: AuditConfig) -> None:
    # Imported once the config is known to be good: torch takes seconds.
    from outrider.inference.audit.audit import audit

    audit(config)


if __name__ == "__main__":
    main()

"""Self-speculation: the target without some of its layers drafts (arXiv 2309.08168)."""

from outrider.inference.settings.kind import Kind

# It reads a method's `skip`, and needs single layers of the target.
KIND = Kind("skip_layers", f"{__name__}.drafter:SkipLayersPlugin", keys=("skip",), layers=True)

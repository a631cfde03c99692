"""report.html: the report as one self-contained page."""

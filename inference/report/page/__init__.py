"""report.html: what was measured as one page that needs nothing but itself."""

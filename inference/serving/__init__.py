"""Drafters in other engines' processes: what those engines load, and the page that says how."""

"""How passes run, and what is chosen for a device. An engine is loaded when something first decodes on it."""

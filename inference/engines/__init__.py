"""Engines, which run passes, and the choice of one for a device. An engine is loaded on its first use."""

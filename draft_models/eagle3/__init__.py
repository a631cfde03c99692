"""EAGLE-3 heads: how one is to be read, the module, and the formats that it is stored in."""

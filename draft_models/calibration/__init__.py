"""EESD's calibration head: the module, and its files in a drafter's directory."""

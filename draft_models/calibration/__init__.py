"""EESD's calibration head: the module, and its files beside a drafter's."""

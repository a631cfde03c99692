"""EESD's early-exit drafter: the module and its checkpoint."""

"""Diagnosis of drafters: how a checkpoint is read, its training target, and its agreement with the target."""

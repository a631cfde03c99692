"""One entry script per thing trained, over one shared fit."""

"""What draft heads of all kinds share: their sizes, their attention, their layers' config, their files.

A draft head reads hidden states of the target (EAGLE-3, DFlash, DSpark). Each kind has a folder of its own beside this.
"""

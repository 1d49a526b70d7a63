"""Transports: one file each, with its sending and its receiving half. `base` says what they promise."""

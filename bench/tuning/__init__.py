"""Which knobs: sweep them, and recommend some."""

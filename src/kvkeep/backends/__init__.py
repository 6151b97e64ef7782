"""KEEPS: external storage (L2). `base` is the contract; wrappers verify, bound and measure it."""

"""One file per way to multiply; `base.Engine` is what they have in common."""

"""Recording: what ran in which type, why, and at what cost."""

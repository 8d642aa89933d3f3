"""Forward simulation."""

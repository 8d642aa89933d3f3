"""What every room may use."""

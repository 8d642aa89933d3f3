"""What is given: a drift, a noise, a time span."""

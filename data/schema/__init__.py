"""What the columns of a click log mean."""

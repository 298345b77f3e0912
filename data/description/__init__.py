"""What a click log or a prepared data set holds: statistics, a table, a picture."""

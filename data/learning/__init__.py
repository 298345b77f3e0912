"""What is learned from the training part: vocabularies, ranges, quantiles."""

# Columns of a table of counted values.
VALUE, COUNT = "value", "count"

"""What is learned from the training part: vocabularies, ranges, quantiles."""

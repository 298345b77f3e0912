"""A log that comes in files: each file is a period, scored by the model so far, then trained on."""

"""Prepared data sets on disk: arrays in shards beside a manifest."""

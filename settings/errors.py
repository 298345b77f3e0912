"""What is wrong with a user's settings."""


class SettingsError(Exception):
    """Settings that cannot be used: the user's mistake. Found by all ranks alike."""

    known_to_all_ranks = True

"""What the set-up says to the user, and the error that ends it."""


class SetUpError(Exception):
    """The set-up cannot go on; the message is one sentence for the user."""


def say(text: str) -> None:
    """Print a line of the set-up at once."""
    print(f"setup: {text}", flush=True)


def last_line(text: str) -> str:
    """Return the last line of a program's output."""
    return (text.strip().splitlines() or ["no message"])[-1]

"""Memory of operations on a CPU."""

from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_memory(action):
    """Most bytes that an action allocates at a time on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))

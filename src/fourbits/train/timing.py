"""Timestamps on a device, which measure the duration of a step without waiting for its end."""

import time

import torch


class Timestamp:
    """The time when the device reaches this point: an event in a GPU's stream, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._host_time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def reached(self) -> bool:
        """Whether the device has reached this point."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block until the device has reached this point."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Timestamp") -> float:
        """Device time between two timestamps of one device, both reached."""
        if self._event is None or earlier._event is None:
            return self._host_time - earlier._host_time
        return earlier._event.elapsed_time(self._event) / 1000

"""Points in a device's time, so that the duration of a step can be measured without waiting for its end."""

import time

import torch


class Mark:
    """When the device reaches this point: on a GPU an event in its stream, elsewhere the present moment."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._moment = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def reached(self) -> bool:
        """Whether the device has come to this point."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Return when the device has come to this point."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Mark") -> float:
        """Device time between two marks of one device, both reached."""
        if self._event is None or earlier._event is None:
            return self._moment - earlier._moment
        return earlier._event.elapsed_time(self._event) / 1000

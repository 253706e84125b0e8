"""A loss scaler that several optimizers can share without agreeing on who updates it."""

from __future__ import annotations

from typing import Any

import torch


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose `update` takes effect at the next `scale`.

    torch asks for one `update` per iteration, after all optimizers have stepped: after it, gradients that are still
    waiting would be divided by a new scale, or divided twice. A wrapper around one optimizer cannot know about the
    others, so each may call `update` after its own step, and the scale changes once, when the next loss is scaled (or
    the scale is read).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._update_is_due = False

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to the overflows since the last one: at the next `scale`, or now to `new_scale`."""
        if new_scale is None:
            self._update_is_due = self.is_enabled()
        else:
            self._update_is_due = False
            super().update(new_scale)

    def scale(self, outputs: Any) -> Any:
        """The loss, or a tree of them, times the scale."""
        if self._update_is_due:
            self._update_now()
        return super().scale(outputs)

    def get_scale(self) -> float:
        """The scale of the next loss. Waits for the device."""
        if self._update_is_due:
            self._update_now()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth counter after the update that is due."""
        if self._update_is_due:
            self._update_now()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a snapshot; an update that is due belongs to the past and is dropped."""
        if self._update_is_due:
            self._update_now()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._update_is_due:
            self._update_now()
        return super().__getstate__()

    def _update_now(self) -> None:
        self._update_is_due = False
        super().update()

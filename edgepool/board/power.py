"""What a faster power mode would give. It is said, never set."""

from __future__ import annotations

from typing import Dict, Optional

from ..config import ModelConfig
from ..engine.footprint import precisions_of
from ..engine.roofline import Speed, mode_of, speed
from ..targets import Target
from .fit import Choice


def faster_mode(
    config: ModelConfig, target: Target, choice: Choice, mode: Optional[int]
) -> Optional[str]:
    """The bounds on speed in a mode of nvpmodel and in the fastest one; None without figures, or
    where the mode is the fastest."""
    int8 = choice.precision == "int8"
    precision = next(p for p in precisions_of(target) if p.int8 == int8)  # FP32 counts as FP16
    bounds: Dict[int, Speed] = {}
    for m in target.power_modes:
        figures = mode_of(m.name, m)
        if figures is not None:
            bounds[m.id] = speed(config, target, figures, precision, choice.context, choice.batch)
    if mode not in bounds:
        return None
    names = {m.id: m.name for m in target.power_modes}
    best = max(bounds, key=lambda m: (bounds[m].decode_tokens_s, -bounds[m].prefill_s))
    now, then = bounds[mode], bounds[best]
    if (now.decode_tokens_s, now.prefill_s) == (then.decode_tokens_s, then.prefill_s):
        return None
    return (
        "%s decodes at most %.3g tokens/s; %s would allow %.3g, and a prompt %.1f times as fast: "
        "sudo nvpmodel -m %d"
        % (
            names[mode],
            now.decode_tokens_s,
            names[best],
            then.decode_tokens_s,
            now.prefill_s / then.prefill_s,
            best,
        )
    )

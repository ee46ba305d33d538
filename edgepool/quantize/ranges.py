"""What calibration keeps of the values it sees: per-channel extremes, histograms of fixed size."""

from __future__ import annotations

import numpy as np

BINS = 512  # of |value|, for entropy and percentile
PERCENTILE = 99.999  # of |value| within the range
SMALLEST = 1e-12  # of a sum of squares
LEVELS = 128  # of a symmetric INT8 half


class Extremes:
    """Lowest, highest and mean squared value of each channel, over everything that was added.

    In the mean, a token's squares are weighted by the inverse of their sum: errors matter relative
    to the token's own size, and the first of a sequence can be a thousand times larger than others.
    """

    def __init__(self, channels: int):
        self.lowest = np.full(channels, np.inf, np.float32)
        self.highest = np.full(channels, -np.inf, np.float32)
        self._squares = np.zeros(channels, np.float64)
        self._weights = 0.0

    def add(self, values: np.ndarray) -> bool:
        """Take [..., C] values; False if one of them is NaN or infinite."""
        rows = values.reshape(-1, values.shape[-1])
        lowest, highest = rows.min(0), rows.max(0)  # NaN wins in both
        self.lowest = np.minimum(self.lowest, lowest)
        self.highest = np.maximum(self.highest, highest)
        sums = np.einsum("rc,rc->r", rows, rows, dtype=np.float64)
        weights = np.divide(1, sums, out=np.zeros_like(sums), where=sums > SMALLEST)
        self._squares += np.einsum("rc,rc,r->c", rows, rows, weights, dtype=np.float64)
        self._weights += float(weights.sum())
        return bool(np.isfinite(lowest).all() and np.isfinite(highest).all())

    @property
    def channels(self) -> np.ndarray:
        """Largest |value| of each channel [C]."""
        return np.maximum(np.abs(self.lowest), np.abs(self.highest))

    @property
    def mean_squares(self) -> np.ndarray:
        """Weighted mean of value^2 of each channel [C]."""
        return self._squares / max(self._weights, SMALLEST)


class Histogram:
    """Counts of |value / scale| in BINS equal bins up to the largest, which is known before."""

    def __init__(self, scale: np.ndarray, largest: float):
        self._inverse = (1 / scale).astype(np.float32)
        self.largest = largest
        self.counts = np.zeros(BINS, np.int64)

    def add(self, values: np.ndarray) -> None:
        scaled = np.abs(values.reshape(-1, values.shape[-1]) * self._inverse)
        self.counts += np.histogram(scaled, BINS, (0, self.largest))[0]

    def percentile(self, share: float = PERCENTILE) -> float:
        """The smallest bin edge with `share` per cent of the values below it."""
        total = np.cumsum(self.counts)
        at = int(np.searchsorted(total, total[-1] * share / 100))
        return self.largest * min(at + 1, BINS) / BINS

    def entropy(self) -> float:
        """The threshold of least KL divergence (Migacz, "8-bit inference with TensorRT", GTC 2017).

        onnxruntime's search, which takes a histogram that is symmetric about zero.
        """
        from onnxruntime.quantization.calibrate import HistogramCollector

        both = np.concatenate([self.counts[::-1], self.counts]) // 2
        edges = np.linspace(-self.largest, self.largest, 2 * BINS + 1, dtype=np.float32)
        collector = HistogramCollector("entropy", True, 2 * BINS, LEVELS, PERCENTILE, "same")
        found = collector.get_entropy_threshold((both, edges, edges[0], edges[-1]), LEVELS)
        return float(max(abs(found[0]), abs(found[1])))

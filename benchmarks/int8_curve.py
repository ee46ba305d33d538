"""Quality against the share of multiply-adds in INT8, on the text that calibration held out.

    python -m benchmarks.int8_curve BUNDLE [--float 0,8,32,64,121] [-o benchmarks/results]

The inputs that lose most stay in float, so many of them in each point, by the measured order that
`edgepool quantize --auto` takes. The first point is without the two halves of down_proj's inputs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Collection
from pathlib import Path

from edgepool.bundle import Bundle
from edgepool.progress import silent
from edgepool.quantize import gate, record
from edgepool.quantize.compare import Comparison, Graph, compare
from edgepool.quantize.quantize import NAME, write
from edgepool.quantize.rounding import rounded_weights
from edgepool.quantize.sensitivity import sensitivities
from edgepool.quantize.source import Source, prepare


class Once(Source):
    """As `Source`, with every INT8 input given once."""

    def halved(self, float_inputs: Collection[str] = ()) -> tuple[str, ...]:
        return ()


def point(label: str, source: Source, names: Collection[str], c: Comparison) -> dict[str, object]:
    return {
        "label": label,
        "int8": source.int8_share(names),
        "int8_once": source.int8_share({*names, *source.halved()}),
        "perplexity_increase": c.perplexity_increase,
        "perplexity_error": c.perplexity_error,
        "top1_agreement": c.agreement,
        "kl": c.kl,
    }


def curve(path: Path, counts: list[int], tokens: int) -> list[dict[str, object]]:
    bundle = Bundle.open(path)
    source = prepare(bundle, None, True)
    ids = record.read(bundle.file(record.NAME), bundle).held_out[:tokens]
    reference = Graph(bundle.model_path, bundle.config)
    points = []
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        rounded = rounded_weights(source, Path(folder))
        ranked = [s.group for s in sorted(sensitivities(source, rounded), key=lambda s: -s.inputs)]
        sets = [(f"{n} inputs in float", source, ranked[:n]) for n in counts]
        for label, made, names in [("inputs once", Once(**vars(source)), []), *sets]:
            graph = Path(folder) / NAME
            write(made, rounded, graph, names, None, silent)
            judged = compare(reference, Graph(graph, made.config), ids, layers=False)
            points.append(point(label, made, names, judged))
            print(json.dumps(points[-1]), flush=True)
            for file in Path(folder).glob(f"{NAME}*"):
                file.unlink()
    return points


def plot(points: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    share = [100 * p["int8"] for p in points[1:]]
    limits = gate.Limits()
    bounds = (limits.perplexity, limits.agreement)
    errors = [p["perplexity_error"] for p in points[1:]]
    keys = ("perplexity_increase", "top1_agreement")
    for one, key, limit, error in zip(axes, keys, bounds, (errors, None)):
        one.errorbar(share, [p[key] for p in points[1:]], error, fmt="o-", capsize=2)
        one.axhline(limit, color="grey", linewidth=0.8, linestyle=":")
        one.set(xlabel="multiply-adds in INT8, %", title=f"{key.replace('_', ' ')}, %")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--float", default="0,8,32,64,121", help="inputs in float, of each point")
    parser.add_argument("--tokens", type=int, default=gate.TOKENS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    counts = [int(n) for n in options.float.split(",")]
    points = curve(options.bundle, counts, options.tokens)
    if options.output is not None:
        text = json.dumps(points, indent=1)
        (options.output / "int8_curve.json").write_text(text + "\n")
        plot(points, options.output / "int8_curve.png")


if __name__ == "__main__":
    main()

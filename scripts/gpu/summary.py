"""From records to a page of text, one JSON object, and a plot."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

from .records import SECTIONS, RecordFile


def summarise(records: RecordFile, *, seconds: float) -> tuple[str, dict[str, Any]]:
    """The text, and everything as one object (`results.json`)."""
    lines = records.read()
    devices = [r for r in lines if r["kind"] == "device"]
    results = records.results()
    everything = {
        "device": devices[0] if devices else None,
        "seconds": round(seconds, 1),
        "workers": len(devices),
        "notes": [r["text"] for r in lines if r["kind"] == "note"],
        "results": results,
    }
    text = [_head(everything)]
    for section in SECTIONS:
        mine = [r for r in results if r["section"] == section]
        counts = Counter(r["status"] for r in mine)
        text.append(f"{section}: " + (", ".join(f"{n} {s}" for s, n in counts.items()) or "none"))
    for status in ("fail", "unsupported", "skipped"):
        chosen = [r for r in results if r["status"] == status]
        if chosen:
            text.append(f"\n{status}:")
            text += [f"  {r['item']}: {r.get('reason', '')}" for r in chosen]
    text += _speed_table([r for r in results if r["section"] == "speed" and "contenders" in r])
    steps = [r for r in results if r["section"] == "step" and r.get("note")]
    if steps:
        text.append("\nthe whole step:")
        text += [f"  {r['item']}: {r['note']}" for r in steps]
    text += [f"note: {note}" for note in everything["notes"]]
    return "\n".join(text) + "\n", everything


def _head(everything: dict[str, Any]) -> str:
    device = everything["device"]
    if device is None:
        return "no device"
    versions = ", ".join(f"{name} {v}" for name, v in device["versions"].items())
    return (
        f"{device['device_kind']}, {versions}, {device['date']}, {everything['seconds']} s, "
        f"{everything['workers']} worker processes"
    )


def _speed_table(results: list[dict[str, Any]]) -> list[str]:
    """Achieved bytes/s of every contender as a share of the device copy of the same minute."""
    if not results:
        return []
    names = contender_names(results)
    width = max(len(r["item"]) for r in results)
    head = " ".join(f"{name:>12}" for name in ["floor us", "best us", *names])
    rows = ["\ndecode attention, bytes/s as a share of a measured device copy:"]
    rows.append(f"  {'':{width}} {head}")
    for result in results:
        contenders = result["contenders"]
        best = min(contenders[name]["seconds"] for name in names if name in contenders)
        cells = [f"{result['floor_seconds'] * 1e6:.1f}", f"{best * 1e6:.1f}"]
        for name in names:
            found = contenders.get(name)
            cells.append("-" if found is None else f"{found['share_of_copy']:.0%}")
        mark = "  (in L2)" if result["in_l2"] else ""
        row = " ".join(f"{cell:>12}" for cell in cells)
        rows.append(f"  {result['item']:{width}} {row}{mark}")
    rates = sorted(result["copy_bytes_per_s"] for result in results)
    rows.append(f"  copy (read + write): {rates[0]:.3g} to {rates[-1]:.3g} bytes/s")
    return rows


def contender_names(results: list[dict[str, Any]]) -> list[str]:
    """Everyone who was measured at any shape, in order of appearance."""
    names = dict.fromkeys(name for r in results for name in r["contenders"])
    return [name for name in names if name != "empty"]


def draw(everything: dict[str, Any], path: Path) -> str:
    """Plot the shares of the copy; says what was done. Without matplotlib nothing is drawn."""
    results = [r for r in everything["results"] if "contenders" in r]
    if not results:
        return "no plot: no speed was measured"
    try:
        importlib.import_module("matplotlib").use("agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return "no plot: matplotlib is not installed"

    figure, axes = pyplot.subplots(figsize=(1.5 + 0.45 * len(results), 5), layout="constrained")
    for name in contender_names(results):
        at = [i for i, r in enumerate(results) if name in r["contenders"]]
        shares = [100 * results[i]["contenders"][name]["share_of_copy"] for i in at]
        axes.plot(at, shares, marker="o", linestyle="none", label=name)
    labels = [r["item"].removeprefix("decode/") for r in results]
    axes.set_xticks(range(len(results)), labels, rotation=90, fontsize=7)
    axes.axhline(100, color="grey", linewidth=0.5)
    axes.set_ylabel("% of a device copy's bytes/s")
    axes.set_ylim(bottom=0)
    axes.set_title(f"decode attention, {everything['device']['device_kind']}")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return f"plot: {path}"

"""What changed between a kept report and this one."""

from typing import Any

# Differs from run to run, or with the machine.
NOISE = ("seconds",)


def diff_lines(kept: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for every figure that differs; cases that only one side has are named.

    Args:
        kept: an earlier report's JSON.
        new: this one's; only the GPUs and cases that it has are compared.

    >>> old = {"results": {"h100": {"a": {"status": "ok", "kernels": [{"registers": 80}]}}}}
    >>> diff_lines(old, {"results": {"h100": {"a": {"status": "ok", "kernels":
    ...     [{"registers": 96}]}}}})
    ['h100 a: kernels.0.registers 80 -> 96']
    """
    lines = [
        f"{field}: {kept.get(field)} -> {new.get(field)}"
        for field in ("jax", "ptxas", "nvdisasm")
        if kept.get(field) != new.get(field)
    ]
    for gpu, found in new["results"].items():
        before = kept["results"].get(gpu, {})
        for key, facts in found.items():
            if key not in before:
                lines.append(f"{gpu} {key}: not in the kept report")
                continue
            old, now = _flatten(before[key]), _flatten(facts)
            for name in sorted(old.keys() | now.keys()):
                if old.get(name) != now.get(name):
                    lines.append(f"{gpu} {key}: {name} {old.get(name)} -> {now.get(name)}")
    return lines


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(x, dict) for x in value):
        items = enumerate(value)
    else:
        return {prefix[:-1]: value}
    flat = {}
    for name, inner in items:
        if name not in NOISE:
            flat |= _flatten(inner, f"{prefix}{name}.")
    return flat

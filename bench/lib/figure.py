"""What a benchmark prints: one JSON line a figure. Called by every bench/NAME.py."""

import json


def line(name, value, unit, goal=None):
    """A figure with a goal holds if its value is at least the goal; one without only informs."""
    return json.dumps(
        {
            "name": name,
            "value": float(f"{value:.4g}"),
            "goal": goal,
            "unit": unit,
            "holds": goal is None or value >= goal,
        }
    )

"""A plan in a YAML file: four tables of names and axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtensor_lm.errors import PlanError
from dtensor_lm.sharding_plans.plan import Plan


def read_plan(path: str) -> Plan:
    """Reads from YAML's nodes: a key given twice is a fault, and no tag is ever executed or guessed.

    Raises `PlanError` with every fault of the file.
    """
    import yaml

    faults: list[str] = []

    def line(node: Any) -> str:
        return f"{path}:{node.start_mark.line + 1}"

    def plain(node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    faults.append(f"{line(key)}: a key must be a name")
                elif key.value in found:
                    faults.append(f"{line(key)}: {key.value} is given twice")
                else:
                    found[key.value] = plain(value)
            return found
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        if node.tag == "tag:yaml.org,2002:null":
            return None
        if node.tag == "tag:yaml.org,2002:bool":
            return node.value.lower() in ("true", "yes", "on")
        return node.value

    try:
        if not Path(path).is_file():
            raise PlanError(f"--plan {path}: is not a file")
        root = yaml.SafeLoader(Path(path).read_text(encoding="utf-8")).get_single_node()
        data = {} if root is None else plain(root)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        if isinstance(error, PlanError):
            raise
        text = "is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise PlanError(f"--plan {path}: {text}") from None
    if faults:
        raise PlanError(f"plan {path} cannot be read:", faults)
    return Plan.from_dict(data, f"plan {path}")

"""Checks of config fields: each raises a ValueError that names the field, what is allowed and what was found."""


def require_one_of(name: str, value, allowed) -> None:
    """Raise for anything but one of these texts."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, found {value!r}.")


def number(name: str, value) -> float:
    """YAML 1.1 reads `1e-3` as text; fields declared float are cast by the parser, list items are not."""
    try:
        if isinstance(value, bool):
            raise TypeError("a switch is no number")
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number, found {value!r}.") from error


def require_whole(name: str, value, unit: str) -> None:
    """Raise for anything but a whole number >= 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of {unit} >= 1, found {value!r}.")


def require_steps(name: str, value) -> None:
    """Raise for anything but a whole number >= 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a whole number of steps >= 0, found {value!r}.")


def pair(name: str, value) -> list[float]:
    """A lowest and a highest value, as floats; raise for anything but two numbers."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{name} must hold two numbers, lowest and highest, found {value!r}.")
    return [number(name, part) for part in value]

"""Random JSON schemas of what structured output supports, small enough for short answers."""

import random
from typing import Any, Final

WORDS: Final = ("name", "age", "größe", "tags", "ok", "x", "city", "漢字", "a b", 'q"t')


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:  # noqa: C901 - one case a kind
    """Return a schema; `depth` counts from the root, which is an object most of the time."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "nullable"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf", "oneOf", "tuple"]
    match "object" if depth == 0 and rng.random() < 0.7 else rng.choice(kinds):
        case "string":
            return _random_string(rng)
        case "integer":
            low = rng.randint(-50, 50)
            bounds = {"minimum": low, "maximum": low + rng.randint(0, 200)}
            if rng.random() < 0.3:
                bounds = {"exclusiveMinimum": low, "multipleOf": rng.randint(1, 9), "maximum": 900}
            return {"type": "integer", **bounds}
        case "number":
            least = round(rng.uniform(-9, 9), 2)
            most = least + rng.choice([0.5, 3, 90.25])
            return {"type": "number", "minimum": least, "maximum": most}
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, [1, "x"], {"a": 1}], 3)}
        case "const":
            return {"const": rng.choice([*WORDS, -7, False, {"k": [None]}])}
        case "nullable":
            return {
                "type": [rng.choice(["boolean", "integer"]), "null"],
                "maximum": 99,
                "minimum": 0,
            }
        case "object":
            return random_object(rng, depth)
        case "array":
            low = rng.randint(0, 2)
            items = random_schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + 1}
        case "tuple":
            parts = [random_schema(rng, depth + 2) for _ in range(rng.randint(1, 2))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "oneOf":
            return {"oneOf": [_tagged(rng, tag, depth) for tag in rng.sample(WORDS, 2)]}
        case kind:
            return {"type": kind, "description": "plain"}


def _random_string(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "string", "maxLength": 12},
            {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 9)},
            {"type": "string", "pattern": "^[a-z]{2,6}(-[0-9]+)?$"},
            {"type": "string", "pattern": r"^\d{1,3} (é|ü|漢)+$"},
            {"type": "string", "format": rng.choice(["date", "uuid", "email", "ipv4"])},
            {"type": "string", "enum": rng.sample(WORDS, 2)},
        ]
    )


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return the schema of an object with up to four fields."""
    names = rng.sample(WORDS, rng.randint(1, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
    }
    match rng.randrange(5):
        case 0:
            schema["additionalProperties"] = False
        case 1:
            schema["$defs"] = {"leaf": random_schema(rng, 3)}
            if depth == 0:  # references count from the root
                schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf"}
                schema["required"].append("leaf")
            else:
                del schema["$defs"]
        case 2:
            schema["required"] = [*names, "undescribed"]
            schema["additionalProperties"] = {"type": "integer", "minimum": 1, "maximum": 9}
            schema["maxProperties"] = len(names) + 1
    return schema


def _tagged(rng: random.Random, tag: str, depth: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": tag}, "value": random_schema(rng, depth + 2)},
        "required": ["kind"],
    }

"""What the gateway sends: Structs, encoded as they are and described in /openapi.json."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, get_type_hints

import msgspec
from pydantic import Field, GetCoreSchemaHandler, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaMode
from pydantic_core import CoreSchema, core_schema
from starlette.responses import Response

REF: Final = "#/components/schemas/{model}"


def says(description: str) -> FieldInfo:
    """Describe a field: `Annotated[int, says("Tokens that were given up.")]`."""
    info: FieldInfo = Field(description=description)
    return info


class ResponseModel(msgspec.Struct, omit_defaults=True):
    """Base of everything the gateway sends. A field with a default is absent where it has it.

    pydantic describes Structs for /openapi.json, and tests read answers with it: msgspec does
    neither for a union of Structs that no single field tells apart.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Describe the Struct as an object that has no other fields."""
        hints = get_type_hints(cls, include_extras=True)
        fields = {
            field.name: core_schema.typed_dict_field(
                handler.generate_schema(hints[field.name]), required=field.required
            )
            for field in msgspec.structs.fields(cls)
        }
        return core_schema.no_info_after_validator_function(
            lambda told: cls(**told),
            core_schema.typed_dict_schema(fields, cls=cls, extra_behavior="forbid"),
            ref=f"{cls.__module__}.{cls.__qualname__}:{id(cls)}",
        )


class CompleteModel(ResponseModel, omit_defaults=False):
    """Base of what is sent with all its fields, those with a default too."""


def json_response(content: object, headers: Mapping[str, str] | None = None) -> Response:
    """Encode `content` as a response with status 200."""
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")


def schemas_of(models: Iterable[type]) -> dict[str, Any]:
    """Return the JSON schemas of Structs and pydantic models by name, and of what is in them."""
    wanted: list[tuple[type, JsonSchemaMode, TypeAdapter[Any]]] = [
        (model, "validation", TypeAdapter(model)) for model in dict.fromkeys(models)
    ]
    _, definitions = TypeAdapter.json_schemas(wanted, ref_template=REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas

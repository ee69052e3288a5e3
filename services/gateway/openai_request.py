"""From the body of an HTTP request to its fields and its model. Pure.

The model may be left out if only one is served. shared/openai/call.py turns the fields into native requests.
"""

from __future__ import annotations

from services.gateway.errors import Unprocessable
from shared.errors import BadRequest
from shared.json_body import read_json
from shared.openai.call import Body


def fields_of(data: bytes) -> Body:
    """The fields of a JSON body, without null fields. Raises BadRequest, Unprocessable."""
    try:
        fields = read_json(data)
    except RecursionError:
        raise BadRequest("the body is nested too deeply: send flat values") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error!s:.200}") from None
    if not isinstance(fields, dict):
        raise Unprocessable(f"the body is a JSON {type(fields).__name__}, an object with fields is expected")
    return {name: value for name, value in fields.items() if value is not None}


def model_of(fields: Body, served: list[str]) -> str:
    """The model of a request; without one, the only model of `served`. Raises BadRequest."""
    model = fields.get("model")
    if model is None and len(served) == 1:
        return served[0]
    if not isinstance(model, str) or not model:
        there = ", ".join(served)
        raise BadRequest(f"`model`: the name of a model is expected; there is {there:.200}", param="model")
    return model

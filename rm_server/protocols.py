"""Routes that other trainers' clients already know. docs/integrations.md has the configuration for each of them.

Invariant: each route only translates: to the same items, options and engine call as ``/score``, and back. A reward is
raw unless the protocol's own default says otherwise and the caller did not switch it off. None of these protocols has
room for an item without a reward, so where one has none, the whole answer is its error, with a status that makes this
caller try again if, and only if, that can help.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from rm_server.edge import BodyReader, PlainRoute, decode_json, json_response, until_client_leaves
from rm_server.errors import NonFiniteRewardError, ServerError, VerifierFailedError
from rm_server.protocol_call import Call
from rm_server.protocol_forms import classify_either, embed, llama_factory, openrlhf, reward_url
from rm_server.protocol_schema import PROTOCOL_MODELS, UrlOptions, read_url_options
from rm_server.service import ScoringService

Translate = Callable[[Call, Any], Coroutine[Any, Any, Any]]


class FinalError(ServerError):
    """An error for verl, vLLM's and SGLang's clients: OpenAI's body, and 4xx for what no retry can mend.

    verl tries again on any 5xx, 16 times with growing waits; a NaN is still one afterwards.
    """

    def __init__(self, cause: ServerError) -> None:
        super().__init__(cause.message)
        self.status = 422 if isinstance(cause, NonFiniteRewardError | VerifierFailedError) else cause.status
        self.type, self.retryable, self.cause = cause.type, cause.retryable, cause

    def headers(self) -> dict[str, str]:
        return self.cause.headers()

    def body(self) -> dict[str, Any]:
        body = super().body()
        body["error"] |= {"param": None, "code": self.status}
        return body


def protocol_router(
    service: ScoringService, bodies: BodyReader, refusals: dict[int | str, dict[str, Any]]
) -> APIRouter:
    """The routes. ``refusals`` describes the answers that are not a success, for the schema."""
    router = APIRouter(tags=["other trainers' protocols"], responses=refusals, route_class=PlainRoute)

    async def serve(request: Request, translate: Translate) -> Response:
        arrival = service.clock()
        body = await bodies.read(request)
        try:
            call = Call(service, read_url_options(request.query_params.multi_items()), arrival)
            content = await until_client_leaves(request, translate(call, decode_json(body)))
        finally:
            bodies.release(body)
        service.metrics.request_seconds.labels(route=request.url.path).observe(service.clock() - arrival)
        return json_response(content)

    async def serve_openai(request: Request, translate: Translate) -> Response:
        try:
            return await serve(request, translate)
        except ServerError as error:
            raise FinalError(error) from None

    @router.post("/get_reward", openapi_extra=_body_of("OpenRLHFRequest"))
    async def get_reward(request: Request) -> Response:
        """OpenRLHF's `--reward.remote_url`: `rewards` are raw, `scores` are squashed into (0, 1) for its filter."""
        return await serve(request, openrlhf)

    @router.post("/reward", openapi_extra=_body_of("RewardUrlRequest"))
    async def reward(request: Request) -> Response:
        """slime's and miles' `--rm-url`: the whole answer is the reward, a bare number."""
        return await serve(request, reward_url)

    @router.post("/v1/score/evaluation", openapi_extra=_body_of("ScoreEvaluationRequest"))
    async def score_evaluation(request: Request) -> Response:
        """LLaMA-Factory's PPO with `reward_model_type: api`. Waits up to an hour, for its client never tries again."""
        return await serve(request, llama_factory)

    @router.post("/classify", openapi_extra=_body_of("VllmClassifyRequest", "SGLangClassifyRequest"))
    async def classify(request: Request) -> Response:
        """vLLM's form (`input` or `messages`) and SGLang's (`text` or `input_ids`), told apart by their fields."""
        return await serve_openai(request, classify_either)

    @router.post("/v1/embeddings", openapi_extra=_body_of("VllmClassifyRequest"))
    async def embeddings(request: Request) -> Response:
        """The reward as an embedding of one number, as verl reads it from SGLang."""
        return await serve_openai(request, embed)

    return router


def _body_of(*names: str) -> dict[str, Any]:
    refs = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    body = {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}
    return {
        "requestBody": {"required": True, "content": {"application/json": body}},
        "parameters": [
            _parameter(name, schema) for name, schema in UrlOptions.model_json_schema()["properties"].items()
        ],
    }


def _parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """One parameter of the URL's query. It is left out, never null."""
    about = {"name": name, "in": "query", "required": False, "description": schema.pop("description")}
    (schema,) = [option for option in schema.get("anyOf", [schema]) if option != {"type": "null"}]
    return {**about, "schema": {key: value for key, value in schema.items() if key != "title"}}


def add_schemas(schemas: dict[str, Any]) -> None:
    """Put the requests' schemas among the components of an OpenAPI document."""
    for model in PROTOCOL_MODELS:
        body = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(body.pop("$defs", {}))
        schemas[model.__name__] = body

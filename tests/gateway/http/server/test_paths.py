"""Azure's clients, base URLs without /v1, doubled slashes: the same endpoints elsewhere."""

import json
from typing import Any

import httpx
import openai
import pytest

from outrider.gateway.http.server.paths import meant_path
from tests.gateway.conftest import OpenWorld
from tests.gateway.hybrid import World


@pytest.mark.parametrize(
    ("path", "meant", "model"),
    [
        ("/v1/models", "/v1/models", None),
        ("//v1///chat/completions", "/v1/chat/completions", None),
        ("/openai/deployments/small/chat/completions", "/v1/chat/completions", "small"),
        ("/openai/deployments/small/completions", "/v1/completions", "small"),
        ("/openai/deployments/media/other/embeddings", "/v1/embeddings", "media/other"),
        ("/openai/deployments//embeddings", "/openai/deployments/embeddings", None),
        ("/openai/deployments/small/nothing", "/openai/deployments/small/nothing", None),
        ("/openai/deployments", "/v1/deployments", None),
        ("/openai/models", "/v1/models", None),
        ("/openai/v1/responses", "/v1/responses", None),
        ("/openai", "/openai", None),
        ("/openaix/models", "/openaix/models", None),
        ("/chat/completions", "/v1/chat/completions", None),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens", None),
        ("/v1/v1/v1/models", "/v1/v1/models", None),
        ("/models", "/v1/models", None),
        ("/models/media/other", "/v1/models/media/other", None),
        ("/tokenize", "/v1/tokenize", None),
        ("/audio/speech", "/v1/audio/speech", None),
        ("/modelsx", "/modelsx", None),
        ("/dashboard", "/dashboard", None),
        ("/admin/keys", "/admin/keys", None),
        ("/", "/", None),
    ],
)
def test_paths(path: str, meant: str, model: str | None) -> None:
    assert meant_path(path) == (meant, model)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def azure(world: World, **options: Any) -> openai.AzureOpenAI:
    return openai.AzureOpenAI(
        azure_endpoint=world.url, api_key="none", api_version="2024-10-21", max_retries=0, **options
    )


@pytest.mark.slow
def test_azures_clients_get_answers(open_world: OpenWorld) -> None:
    with open_world() as world:
        with azure(world) as client:
            assert "small" in [each.id for each in client.models.list()]
            made = client.chat.completions.create(model="small", **CHAT)
            assert made.choices[0].message.content
            with client.chat.completions.create(model="small", stream=True, **CHAT) as events:
                assert list(events)
        with azure(world, azure_deployment="small") as client:
            # The deployment is the model, whatever the body says.
            assert client.chat.completions.create(model="gpt-4o", **CHAT).model == made.model
        path = f"{world.url}/openai/deployments/small/chat/completions?api-version=1"
        assert httpx.post(path, json=CHAT).status_code == 200
        twice = json.dumps(CHAT)[:-1] + ', "max_tokens": 5}'
        for body in (twice, "[]", "{", '{"model": 5}'):
            headers = {"content-type": "application/json"}
            assert httpx.post(path, content=body, headers=headers).status_code == 400
        gone = httpx.post(path.replace("small", "gone"), json=CHAT)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        slashes = httpx.post(f"{world.url}//v1//chat/completions", json={**CHAT, "model": "small"})
        assert slashes.status_code == 200

"""Program that asks for JSON of a form, by OpenAI's client and LangChain; its arguments are the URL of the service and a good key."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
from langchain_openai import ChatOpenAI

URL, KEY = sys.argv[1:3]
AT: Any = {"base_url": f"{URL}/v1", "api_key": KEY}
MESSAGES: Any = [{"role": "user", "content": "Ann is 3, as JSON"}]


class Person(openai.BaseModel):
    name: str
    age: int


def found(call: Callable[[], Any]) -> list[Any]:
    """What came, or status, code and param of the error."""
    try:
        answer = call()
        return [answer.name, answer.age]
    except openai.APIStatusError as exc:
        return [exc.status_code, exc.code, exc.param]


def langchain(method: str, *, responses: bool) -> Any:
    """Person that a chat model of LangChain finds."""
    chat: Any = ChatOpenAI(**AT, model="default", use_responses_api=responses)
    return chat.with_structured_output(Person, method=method).invoke("Ann is 3, as JSON")


client = openai.OpenAI(**AT)
parse, respond = client.chat.completions.parse, client.responses.parse
seen = {
    "chat": found(lambda: parse(model="default", messages=MESSAGES, response_format=Person).choices[0].message.parsed),
    "responses": found(lambda: respond(model="default", input=MESSAGES, text_format=Person).output_parsed),
    **{
        f"langchain, {method}, {responses}": found(partial(langchain, method, responses=responses))
        for method in ("json_schema", "json_mode")
        for responses in (False, True)
    },
}
sys.stdout.write(json.dumps(seen))

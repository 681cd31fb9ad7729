"""Messages of the `verifiers` library as text, and tool calls in text as its messages.

The policy is asked with text and answers with tokens, so tools are described to it and called by it
in the text itself, in the form that Hermes and Qwen models were trained on:

```
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
```
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vcpo_rollout.environments.environment import Prompt

Message = Mapping[str, Any]

_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TOOLS: Final = (
    "You may call functions to help with the task. Their signatures:\n<tools>\n{tools}\n</tools>\n"
    "For each call, write a JSON object with its name and arguments:\n"
    '<tool_call>\n{{"name": <function>, "arguments": <object>}}\n</tool_call>'
)


def prompt_from(
    messages: str | Sequence[Message], tools: Sequence[Message], *, answer: str
) -> Prompt:
    """A prompt of the library's as ours; the tools are described in its system message.

    Raises: ValueError for what is no text, such as images, and for tool calls in examples.
    """
    if isinstance(messages, str):
        return Prompt(text=messages, answer=answer)
    for message in messages:
        if message["role"] not in ("system", "user", "assistant") or message.get("tool_calls"):
            raise ValueError(
                f"a prompt holds a message of the role {message['role']!r} or a call of a tool; "
                "only texts of system, user and assistant can be shown before the first turn"
            )
    described = [_TOOLS.format(tools="\n".join(map(json.dumps, tools)))] if tools else []
    system = [_content(message) for message in messages if message["role"] == "system"]
    asked: list[Any] = [
        {"role": message["role"], "content": _content(message)}
        for message in messages
        if message["role"] != "system"
    ]
    if head := "\n\n".join([*system, *described]):
        asked.insert(0, {"role": "system", "content": head})
    return Prompt(messages=tuple(asked), answer=answer)


def reply_text(messages: str | Sequence[Message]) -> str:
    """What the model is told of an environment's reply; a tool's output is marked as such.

    Raises: ValueError for content that is no text, and for a message in the model's name.
    """
    if isinstance(messages, str):
        return messages
    return "\n".join(map(_told, messages))


def _told(message: Message) -> str:
    if message["role"] == "assistant":
        raise ValueError("a reply holds a message in the model's name, which it has not sampled")
    content = _content(message)
    is_tool = message["role"] == "tool"
    return f"<tool_response>\n{content}\n</tool_response>" if is_tool else content


def answer_message(response: str, *, has_tools: bool) -> dict[str, Any]:
    """A turn of the model's as the library records it, with the calls that its text holds.

    What is no JSON object with a name is no call, as servers of models have it too.
    """
    message: dict[str, Any] = {"role": "assistant", "content": response}
    calls = [_call(number, text) for number, text in enumerate(_CALL.findall(response))]
    if has_tools and (found := [call for call in calls if call is not None]):
        message["tool_calls"] = found
    return message


def _call(number: int, text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = json.dumps(call.get("arguments", {}))
    function = {"name": call["name"], "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _content(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = [str(part["text"]) for part in content if part.get("type") == "text"]
    if len(texts) < len(content):
        raise ValueError("a message holds something else than text; only text can be shown")
    return "".join(texts)

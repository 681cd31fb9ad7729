"""Converts messages of the `verifiers` library to text, and tool calls in text to its messages.

The policy reads and writes text, so the prompt describes the tools, and the response calls them, in
the format that Hermes and Qwen models were trained on:

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

_CALL_ENDS: Final = "</tool_call>"
_CALL: Final = re.compile(rf"<tool_call>(.*?){_CALL_ENDS}", re.DOTALL)
_TOOLS: Final = (
    "You may call functions to help with the task. Their signatures:\n<tools>\n{tools}\n</tools>\n"
    "For each call, write a JSON object with its name and arguments:\n"
    '<tool_call>\n{{"name": <function>, "arguments": <object>}}\n</tool_call>'
)


def to_prompt(
    messages: str | Sequence[Message], tools: Sequence[Message], *, answer: str
) -> Prompt:
    """Convert a prompt of the library; its system message describes the tools.

    Raises: ValueError for content that is not text, such as images, and for calls of tools.
    """
    if isinstance(messages, str):
        return Prompt(text=messages, answer=answer)
    for message in messages:
        if message["role"] not in ("system", "user", "assistant") or message.get("tool_calls"):
            raise ValueError(
                f"a prompt has a message of the role {message['role']!r} or a tool call; only "
                "text messages of system, user and assistant may come before the first turn"
            )
    description = [_TOOLS.format(tools="\n".join(map(json.dumps, tools)))] if tools else []
    system = [_content(message) for message in messages if message["role"] == "system"]
    shown: list[Any] = [
        {"role": message["role"], "content": _content(message)}
        for message in messages
        if message["role"] != "system"
    ]
    if head := "\n\n".join([*system, *description]):
        shown.insert(0, {"role": "system", "content": head})
    return Prompt(messages=tuple(shown), answer=answer)


def reply_text(messages: str | Sequence[Message]) -> str:
    """Return the text of an environment's reply; tags mark the output of a tool.

    Raises: ValueError for content that is not text, and for an assistant message.
    """
    if isinstance(messages, str):
        return messages
    parts = []
    for message in messages:
        if message["role"] == "assistant":
            raise ValueError("a reply has an assistant message, which the model did not sample")
        content = _content(message)
        is_tool = message["role"] == "tool"
        parts.append(f"<tool_response>\n{content}\n</tool_response>" if is_tool else content)
    return "\n".join(parts)


def to_assistant_message(response: str, *, has_tools: bool) -> dict[str, Any]:
    """Convert a turn of the model to the library's message, with the tool calls in its text.

    A call must be a JSON object with a name; other text is ignored, as model servers do.
    """
    message: dict[str, Any] = {"role": "assistant", "content": response}
    # Up to the last end every call is closed, so the search passes the response once.
    closed = response[: response.rfind(_CALL_ENDS) + len(_CALL_ENDS)]
    calls = [_parse_call(number, text) for number, text in enumerate(_CALL.findall(closed))]
    if has_tools and (found := [call for call in calls if call is not None]):
        message["tool_calls"] = found
    return message


def _parse_call(number: int, text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = json.dumps(call.get("arguments", {}))
    except (ValueError, RecursionError):
        return None
    function = {"name": call["name"], "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _content(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = [str(part["text"]) for part in content if part.get("type") == "text"]
    if len(texts) < len(content):
        raise ValueError("a message has content other than text; only text is supported")
    return "".join(texts)

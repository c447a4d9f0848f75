"""Turns of a chat, brought to one form: known roles, text contents, tool arguments as objects, a legal order."""

import json
from typing import Any

Message = dict[str, Any]  # role, content, and where they occur: tool_calls, name, reasoning_content, weight

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "ipython": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")


class RowProblem(Exception):
    """Why a row cannot be used. Its text is the reason in the report."""


def conversation(
    turns: Any, tools: Any = None, system: Any = None, answered: bool = True
) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """(messages, tools) in one form. `answered`: the last turn must be the assistant's, and none may be blank.

    Raises RowProblem.
    """
    if not isinstance(turns, list):
        raise RowProblem("there is no list of turns")
    if not turns:
        raise RowProblem("the conversation is empty")
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        message = _message(turn, i)
        if _is_call(message) and messages and _is_call(messages[-1]):  # several calls at once, one turn each
            messages[-1]["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    _check_order(messages, answered)
    return tuple(messages), _tools(tools)


def _message(turn: Any, index: int) -> Message:
    """One turn. Messages are counted from 1 in reasons, as people count them."""
    where = f"message {index + 1}"
    if not isinstance(turn, dict):
        raise RowProblem(f"{where} is no object with role and content")
    given = turn.get("role", turn.get("from"))
    role = ROLES.get(given.strip().lower()) if isinstance(given, str) else None
    if role is None:
        raise RowProblem(f"{where} has the unknown role {json.dumps(given, default=str)}")
    content = text_of_content(turn.get("content", turn.get("value")), where)
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_tool_call(content, where)]}
    message: Message = {"role": role, "content": content or ""}
    if role == "assistant":
        calls = turn.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise RowProblem(f"{where}: tool_calls is no list")
            message["tool_calls"] = [_tool_call(call, where) for call in calls]
        elif isinstance(turn.get("function_call"), dict):
            message["tool_calls"] = [_tool_call(turn["function_call"], where)]
        reasoning = next((turn[key] for key in _REASONING if isinstance(turn.get(key), str)), None)
        if reasoning:
            message["reasoning_content"] = reasoning
        if content is None and not message.get("tool_calls"):
            raise RowProblem(f"{where}: the answer is null")
        if not message["content"].strip() and not message.get("tool_calls"):
            raise RowProblem(f"{where}: the answer is blank")
        weight = next((turn[key] for key in ("weight", "train", "loss") if turn.get(key) is not None), None)
        if weight is not None:
            if weight not in (0, 1):
                raise RowProblem(f"{where}: weight {weight!r} is neither 0 nor 1")
            message["weight"] = int(weight)
    elif content is None:
        raise RowProblem(f"{where}: the content is null")
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    return message


def _is_call(message: Message) -> bool:
    return message["role"] == "assistant" and not message["content"] and "tool_calls" in message


def text_of_content(content: Any, where: str) -> str | None:
    """Text, or a list of text parts, -> text; null -> None. Raises RowProblem for anything else."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, dict) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                named = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
                raise RowProblem(f"{where} has a part of type {named}; only text is trained here")
        return "".join(texts)
    raise RowProblem(f"{where}: the content is {type(content).__name__}, text is needed")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except ValueError as problem:
            raise RowProblem(f"{where}: the tool call is not valid JSON ({problem})") from None
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem(f"{where}: a tool call has no function name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as problem:
            raise RowProblem(f"{where}: tool arguments are not valid JSON ({problem})") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowProblem(f"{where}: tool arguments are no object")
    found: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        found["id"] = call["id"]
    return found


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except ValueError as problem:
            raise RowProblem(f"field 'tools' is not valid JSON ({problem})") from None
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowProblem("field 'tools' is no list of objects")
    return tuple(tools)


def _check_order(messages: list[Message], answered: bool) -> None:
    """[system] user assistant [tool assistant] user assistant ..."""
    before = "start"
    legal = {
        "start": ("user",),
        "user": ("assistant",),
        "assistant": ("user", "tool"),
        "tool": ("tool", "assistant"),
    }
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "system":
            if i:
                raise RowProblem(f"message {i + 1}: a system turn stands only at the start")
            continue
        if role not in legal[before]:
            if before == "start":
                raise RowProblem(f"the conversation starts with the {role}, not with a user turn")
            if before == role:
                raise RowProblem(f"message {i + 1}: two {role} turns in a row")
            raise RowProblem(f"message {i + 1}: a {role} turn after a {before} turn")
        if role == "tool" and before == "assistant" and not messages[i - 1].get("tool_calls"):
            raise RowProblem(f"message {i + 1}: a tool answers, but no tool was called")
        before = role
    if answered and before != "assistant":
        if not any(m["role"] == "assistant" for m in messages):
            raise RowProblem("no assistant turn")
        raise RowProblem(f"the conversation ends with a {before} turn that nobody answers")
    if not answered and before not in ("user", "tool"):
        raise RowProblem("the last turn of a prompt is the user's")

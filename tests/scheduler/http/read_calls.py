"""What the events of a parser of calls add up to."""

from scheduler.http.tool_calls import CallArguments, CallBegan, Content, Event


def whole_calls(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    """All content, and name and arguments of each call."""
    content = ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case Content(text=text):
                content += text
            case CallBegan(name=name):
                calls.append((name, ""))
            case CallArguments(index=index, text=text):
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls

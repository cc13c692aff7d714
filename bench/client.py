"""A reader without a browser: speaks Streamlit's protocol over a websocket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.sync.client import connect


@dataclass(frozen=True)
class Found:
    """An element on the page: its kind ("slider", "button", ...), its message, and the fragment that drew it."""

    kind: str
    proto: Any
    fragment: str


class Reader:
    """One session. ``open`` it, look at what came, move a widget or press a button."""

    def __init__(self, url: str, page: str = "", query: str = "", *, seconds: float = 60) -> None:
        self.page, self.query, self.seconds = page, query, seconds
        self._socket = connect(
            f"{url.replace('http', 'ws', 1)}/_stcore/stream", subprotocols=["streamlit"], origin=url, max_size=None
        )
        self._elements: dict[tuple[int, ...], Found] = {}
        self._states: dict[str, WidgetState] = {}
        self._page_hash = ""  # the page, as the server calls it once it has run

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def open(self) -> float:
        """Run the page's script; seconds until it has finished."""
        return self._run("")

    def elements(self, *kinds: str) -> Iterator[Found]:
        """What is on the page, in its order."""
        return (found for _, found in sorted(self._elements.items()) if not kinds or found.kind in kinds)

    def lab_slider(self) -> Found:
        """The first control of the lab's panel, the page's first fragment with a slider."""
        return next(found for found in self.elements("slider") if found.fragment)

    def slide(self, slider: Found, position: float) -> float:
        """Move a slider (a select_slider counts its options from 0); seconds until the script has finished."""
        state = WidgetState(id=slider.proto.id)
        if slider.proto.options:
            state.string_array_value.data.append(slider.proto.options[int(position)])
        else:
            state.double_array_value.data.append(position)
        self._states[slider.proto.id] = state
        return self._run(slider.fragment)

    def press(self, button: Found) -> float:
        """Press a button; seconds until the script has finished."""
        return self._run(button.fragment, WidgetState(id=button.proto.id, trigger_value=True))

    def rerun(self, fragment: str = "") -> float:
        """Run the script, or one fragment, again, as a page that polls does."""
        return self._run(fragment)

    def _run(self, fragment: str, *triggers: WidgetState) -> float:
        message = BackMsg()
        client = message.rerun_script
        client.query_string, client.page_name, client.fragment_id = self.query, self.page, fragment
        client.page_script_hash = self._page_hash
        client.context_info.locale, client.context_info.timezone = "en-US", "UTC"
        client.widget_states.widgets.extend([*self._states.values(), *triggers])
        began = time.perf_counter()
        self._socket.send(message.SerializeToString())
        while not self._finished(began):
            pass
        return time.perf_counter() - began

    def _finished(self, began: float) -> bool:
        left = self.seconds - (time.perf_counter() - began)
        message = ForwardMsg.FromString(self._socket.recv(timeout=max(0.01, left)))
        kind = message.WhichOneof("type")
        if kind == "new_session" and not message.metadata.run.fragment_ids:
            self._elements.clear()
        if kind == "navigation":
            self._page_hash = message.navigation.page_script_hash
        if kind == "delta":
            self._note(message)
        return kind == "script_finished" and message.script_finished != ForwardMsg.FINISHED_EARLY_FOR_RERUN

    def _note(self, message: ForwardMsg) -> None:
        path = tuple(message.metadata.delta_path)
        if message.delta.WhichOneof("type") == "new_element":
            element = message.delta.new_element
            kind = str(element.WhichOneof("type"))
            self._elements[path] = Found(kind, getattr(element, kind), message.delta.fragment_id)
        else:  # a block starts over at its place
            self._elements = {p: f for p, f in self._elements.items() if p[: len(path)] != path}

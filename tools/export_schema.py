"""Write schema/card.schema.json, which gives editors completion and checks while a card is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parent.parent))

from content.loader import PROJECT
from content.schema import json_schema

TARGET = PROJECT / "schema" / "card.schema.json"


def exported() -> str:
    """The file's text as it should be."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(exported(), "utf-8")
    print(TARGET)

"""Parts of the results of tools: the text of a document, and a placeholder for what has none.

A result stays in a conversation, so that a refused one would end it. The user can leave an own image out.
"""

import base64
import binascii

_TEXTS = ("text/", "application/json", "application/xml", "application/yaml")


def placeholder(kind: str) -> str:
    """The text that the model reads in the place of a part without text."""
    return f"[{kind} left out: the model reads text only]"


def text_of_data(media_type: object, data: object) -> str | None:
    """The text of a document in base64; None if its type is not one of text, or its bytes are not UTF-8."""
    if (
        not isinstance(media_type, str)
        or not media_type.startswith(_TEXTS)
        or not isinstance(data, str)
    ):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


def text_of_url(url: object) -> str | None:
    """The text of a `data:` URL in base64; None for other addresses and other types."""
    if not isinstance(url, str) or not url.startswith("data:"):
        return None
    head, _, data = url.removeprefix("data:").partition(",")
    media_type, _, coding = head.rpartition(";")
    return text_of_data(media_type, data) if coding == "base64" else None

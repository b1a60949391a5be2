"""Makes the package's long description and URLs: the README, with links that work outside the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)")


def absolute(text: str, repository: str, version: str) -> str:
    """Return a page whose relative links lead to `repository` at the version's tag.

    An empty `repository` removes the links.
    """
    return _LINK.sub(rf"[\1]({repository}/blob/v{version}/\2)" if repository else r"\1", text)


class PackageMetadata(MetadataHookInterface):
    """The hook that Hatchling calls for every build. Its configuration has one key, `repository`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        repository = self.config["repository"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = absolute(text, repository, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        pages = {"Documentation": "/blob/main/docs/index.md", "Changelog": "/blob/main/CHANGELOG.md"}
        urls = {"Repository": repository, **{name: repository + page for name, page in pages.items()}}
        metadata["urls"] = urls if repository else {}

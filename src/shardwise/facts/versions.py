"""The packages that decide a run's numbers, as installed. Read from their metadata, never imported."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("shardwise", "torch", "transformers", "peft", "deepspeed", "bitsandbytes")


def installed_versions() -> dict[str, str]:
    """Python and PACKAGES; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

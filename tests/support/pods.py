"""What the kubelet does for the pods that the chart renders: volumes as directories, and commands.

Paths and ports of the containers become ones of this machine; all else is as rendered.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.local.ports import take_port
from tests.support.chart import Manifest

Data = dict[str, bytes]


class Objects:
    """Secrets and ConfigMaps by name, and the volumes that are made of them."""

    def __init__(self, directory: Path, data: dict[str, Data]) -> None:
        self._directory = directory
        self.data = data
        self._volumes: list[tuple[Path, Manifest]] = []

    def volume(self, pod: str, volume: Manifest) -> Path:
        """The directory of a volume; those of Secrets and ConfigMaps change with `update`."""
        made = self._directory / pod / volume["name"]
        made.mkdir(parents=True, exist_ok=True)
        if self._sources(volume):
            self._volumes.append((made, volume))
            self._write(made, volume)
        return made

    def update(self) -> None:
        """Bring every volume up to date, as the kubelet does: all files of one at once."""
        for made, volume in self._volumes:
            self._write(made, volume)

    def _write(self, made: Path, volume: Manifest) -> None:
        fresh = made / f"..{len(list(made.iterdir()))}"
        fresh.mkdir()
        for path, content in self._files(volume):
            (fresh / path).write_bytes(content)
            if not (made / path).is_symlink():
                (made / path).symlink_to(Path("..data") / path)
        link = made / "..new"
        link.symlink_to(fresh.name)
        os.replace(link, made / "..data")

    def _sources(self, volume: Manifest) -> list[Manifest]:
        if "projected" in volume:
            return [found for source in volume["projected"]["sources"] for found in source.values()]
        return [volume[kind] for kind in ("secret", "configMap") if kind in volume]

    def _files(self, volume: Manifest) -> Iterator[tuple[str, bytes]]:
        for source in self._sources(volume):
            data = self.data[source.get("name") or source["secretName"]]
            items = source.get("items") or [{"key": key, "path": key} for key in data]
            for item in items:
                yield item["path"], data[item["key"]]


class Pod:
    """A pod with one container: its command line and its probes, for this machine.

    `here` is what further texts of the container mean on it.
    """

    def __init__(self, name: str, pod: Manifest, objects: Objects, here: dict[str, str]) -> None:
        (self._container,) = pod["spec"]["containers"]
        self.name = name
        volumes = {one["name"]: objects.volume(name, one) for one in pod["spec"]["volumes"]}
        self._replaced = dict(here)
        for mount in self._container["volumeMounts"]:
            self._replaced[mount["mountPath"]] = str(volumes[mount["name"]])
        self._replaced["$(POD_NAME)"], self._replaced["$(POD_IP)"] = name, "127.0.0.1"
        self.ports: dict[str, int] = {}
        for port in self._container["ports"]:
            free = self.ports[port["name"]] = take_port("127.0.0.1", 0)
            for before in (":", "--port=", "--metrics-port="):
                self._replaced[f"{before}{port['containerPort']}"] = f"{before}{free}"

    def local(self, text: str) -> str:
        """A text of the container with what it means on this machine."""
        wanted = sorted(self._replaced, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, wanted)), lambda m: self._replaced[m[0]], text)

    @property
    def command(self) -> list[str]:
        """What the container runs."""
        words: list[str] = [*self._container["command"], *self._container["args"]]
        return [self.local(word) for word in words]

    def probe(self, kind: str) -> list[str]:
        """The command of a probe: startup, liveness or readiness."""
        probe: dict[str, Any] = self._container[f"{kind}Probe"]
        return [self.local(word) for word in probe["exec"]["command"]]

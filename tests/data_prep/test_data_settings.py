import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from outrider.base.files import user_cache
from outrider.data_prep.text.settings import DataConfig, MixPart

GROUP = Path(__file__).parents[2] / "conf" / "data"


@pytest.mark.parametrize("file", sorted(GROUP.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_choice_of_the_data_group_is_valid(file):
    values = OmegaConf.to_container(OmegaConf.load(file))
    for default in values.pop("defaults", []):
        ((place, name),) = default.items()
        part = OmegaConf.to_container(OmegaConf.load(GROUP / f"{name}.yaml"))
        values["mix"][place.removeprefix("/data@mix.")] |= part
    values["mix"] = {name: MixPart(**part) for name, part in values.get("mix", {}).items()}
    if file.stem == "local":
        assert values.pop("path") == "???"
        values["path"] = "mine.jsonl"
    DataConfig(**values)


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DataConfig().cache == user_cache() == tmp_path / "outrider"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache() == Path.home() / ".cache" / "outrider"
    assert DataConfig(cache_dir="~/c").cache == Path.home() / "c"


def test_settings_import_nothing_heavy():
    code = "import sys, data_prep.text.settings; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from outrider.base.errors import UserError
from outrider.base.files import user_cache
from outrider.data_prep.text.settings import DataConfig, MixPart

GROUP = Path(__file__).parents[2] / "conf" / "data"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "s3"}, r"^source='s3': expected 'python_stdlib', 'hub', 'local'"),
        ({"source": "local"}, r"^path=None: expected a file, directory, glob"),
        ({"source": "hub"}, r"^path=\(\): expected one dataset name"),
        ({"source": "hub", "path": ["a", "b"]}, r"^path=.*one dataset name"),
        ({"path": "x"}, r"^path=\('x',\): expected nothing with source=python_stdlib"),
        ({"source": "local", "path": 3}, r"^path=3: expected a string or a list"),
        ({"source": "local", "path": [""]}, r"^path=\[''\]: expected a string or a list"),
        ({"split": "train_sft"}, r"^split='train_sft': expected 'train', .* source=python_stdlib does not read it"),
        ({"source": "local", "path": "a", "streaming": False}, r"^streaming=False: .* source=local does not read it"),
        ({"source": "hub", "path": "x", "packages": True}, "packages=True: .* source=hub does not read it"),
        ({"source": "local", "path": "a", "subset": "x"}, r"^subset='x': .* source=local does not read it"),
        ({"source": "mix"}, r"^mix=\{\}: expected at least one source with a weight above 0"),
        ({"source": "mix", "mix": {"a": {"weight": 0.0}}}, r"^mix=\{'a': 0.0\}: expected at least one source"),
        ({"source": "mix", "mix": {"a": {"weight": -1}}}, r"^weight=-1"),
        ({"source": "mix", "mix": {"a": {"source": "mix"}}}, r"^source='mix': expected a source that is not a mix"),
        ({"mix": {"a": {}}}, r"^mix=\['a'\]: expected nothing unless source=mix"),
        ({"source": "mix", "mix": {"a": {}}, "template": "vicuna"}, r"^template='vicuna': .*set mix.NAME.template"),
    ],
)
def test_an_impossible_value_is_named(values, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**{**values, "mix": {name: MixPart(**part) for name, part in values.get("mix", {}).items()}})


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

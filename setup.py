"""The package layout of an installation; pyproject.toml has the rest.

A clone has its packages at the top level, where scripts such as train/eesd.py import them. In site-packages their names
would collide with a user's own `conf` or `train.py`. So a wheel has them under `outrider`, and imports them from there.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

OURS = ("conf", "data_prep", "draft_models", "inference", "train")
DATA = {"conf": ["*.yaml", "*/*.yaml", "*/*/*.yaml"], "inference.report": ["page.css", "page.html", "page.js"]}
IMPORT = re.compile(rf"^( *(?:from|import) )(?=(?:{'|'.join(OURS)})\b)", re.MULTILINE)
# The name of a lazily imported module in a string: "inference.drafters.small_lm:PLUGIN".
LATE = re.compile(rf'(?<=")(?=((?:{"|".join(OURS)})(?:\.\w+)+)(?::\w+)?")')


def under_outrider(source: str) -> str:
    """The source of a module with its imports rewritten for a wheel."""
    source = IMPORT.sub(r"\1outrider.", source)
    return LATE.sub(lambda found: "outrider." if _is_module(found[1]) else "", source)


def _is_module(name: str) -> bool:
    place = Path(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").exists()


class BuildUnderOutrider(build_py):
    """Copies each module, rewritten by `under_outrider`."""

    def build_module(self, module, module_file, package):
        outfile, copied = super().build_module(module, module_file, package)
        written = Path(outfile)
        written.write_text(under_outrider(written.read_text("utf-8")), "utf-8")
        return outfile, copied


packages = find_packages(include=[pattern for name in (*OURS, "outrider") for pattern in (name, f"{name}.*")])
if "editable_wheel" in sys.argv:  # installs a path, so scripts next to a clone named outrider import this package
    setup(packages=packages, package_dir={"": "."}, package_data=DATA)
else:
    places = {f"outrider.{name}": name.replace(".", "/") for name in packages if name.partition(".")[0] in OURS}
    setup(
        packages=[*places, *(name for name in packages if name.partition(".")[0] == "outrider")],
        package_dir=places,
        package_data={"outrider": ["usage.txt"], **{f"outrider.{name}": files for name, files in DATA.items()}},
        cmdclass={"build_py": BuildUnderOutrider},
    )

"""Print what installed packages need beside torch, as lines for pip: engine_needs.py PACKAGE …

Engines pin a torch of their own, which would replace the one that is there, and need torchvision for what is no text.
"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

for package in sys.argv[1:]:
    for line in requires(package) or ():
        need = Requirement(line)
        wanted = need.marker is None or need.marker.evaluate({"extra": ""})
        if wanted and not need.name.startswith(("torch", "setuptools", "optimum", "nncf")):
            need.marker = None
            print(need)

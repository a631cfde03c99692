"""The server for clients of OpenAI's API. Raises `UserError` without the packages of the extra [serve]."""

from importlib.util import find_spec

from outrider.base.errors import UserError

for _name in ("fastapi", "uvicorn"):
    if find_spec(_name) is None:
        raise UserError(f"serve needs {_name}: pip install 'outrider[serve]'")

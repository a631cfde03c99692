"""The modules to read: public ones that are safe to import and only define things."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Excluded: modules that open windows or pages (turtle, antigravity, this), for tests or debuggers, and deprecated ones.
STANDARD_LIBRARY = _names("""
    builtins abc argparse array ast asyncio base64 binascii bisect bz2 calendar cmath cmd code codecs codeop
    collections collections.abc colorsys compileall concurrent.futures configparser contextlib contextvars copy
    copyreg csv ctypes dataclasses datetime decimal difflib dis doctest email email.charset email.generator
    email.header email.headerregistry email.message email.parser email.policy email.utils enum faulthandler filecmp
    fileinput fnmatch fractions ftplib functools gc getpass gettext glob graphlib gzip hashlib heapq hmac html
    html.parser http http.client http.cookiejar http.cookies http.server imaplib importlib importlib.abc
    importlib.machinery importlib.metadata importlib.resources importlib.util inspect io ipaddress itertools json
    linecache locale logging logging.config logging.handlers lzma mailbox marshal math mimetypes mmap modulefinder
    multiprocessing multiprocessing.connection multiprocessing.managers multiprocessing.pool
    multiprocessing.shared_memory netrc numbers operator optparse os os.path pathlib pickle pickletools pkgutil
    platform plistlib poplib pprint profile pstats py_compile pyclbr queue quopri random re reprlib runpy sched
    secrets select selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl stat statistics string
    stringprep struct subprocess symtable sys sysconfig tarfile tempfile textwrap threading time timeit token tokenize
    tomllib trace traceback tracemalloc types typing unicodedata unittest unittest.mock urllib.error urllib.parse
    urllib.request urllib.robotparser uuid venv warnings wave weakref webbrowser wsgiref.handlers wsgiref.headers
    wsgiref.simple_server wsgiref.util wsgiref.validate xml.dom.minidom xml.dom.pulldom xml.etree.ElementTree xml.sax
    xml.sax.handler xml.sax.saxutils xml.sax.xmlreader xmlrpc.client xmlrpc.server zipapp zipfile zipimport zlib
    zoneinfo
""")

# Modules of this project's dependencies and their dependencies. A package that is not installed is skipped.
PACKAGES = {
    "torch": _names("""
        torch torch.autograd torch.autograd.functional torch.autograd.profiler torch.distributions torch.fft
        torch.linalg torch.nn torch.nn.functional torch.nn.init torch.nn.utils torch.nn.utils.rnn torch.optim
        torch.optim.lr_scheduler torch.random torch.sparse torch.special torch.utils.checkpoint torch.utils.data
    """),
    "numpy": _names("""
        numpy numpy.fft numpy.lib.stride_tricks numpy.linalg numpy.ma numpy.polynomial numpy.polynomial.chebyshev
        numpy.polynomial.polynomial numpy.random numpy.testing
    """),
    "transformers": _names("""
        transformers.cache_utils transformers.configuration_utils transformers.feature_extraction_utils
        transformers.generation.configuration_utils transformers.generation.logits_process
        transformers.generation.stopping_criteria transformers.generation.streamers transformers.optimization
        transformers.tokenization_utils_base transformers.trainer_callback transformers.training_args
    """),
    "accelerate": _names("accelerate accelerate.utils"),
    "datasets": _names("datasets"),
    "filelock": _names("filelock"),
    "fsspec": _names("fsspec fsspec.spec"),
    "huggingface_hub": _names("huggingface_hub.hf_api huggingface_hub.utils"),
    "jinja2": _names("jinja2"),
    "matplotlib": _names("""
        matplotlib.axes matplotlib.axis matplotlib.cm matplotlib.collections matplotlib.colors matplotlib.figure
        matplotlib.gridspec matplotlib.legend matplotlib.lines matplotlib.patches matplotlib.path matplotlib.text
        matplotlib.ticker matplotlib.transforms
    """),
    "networkx": _names("networkx"),
    "omegaconf": _names("omegaconf"),
    "packaging": _names("""
        packaging.markers packaging.requirements packaging.specifiers packaging.utils packaging.version
    """),
    "pandas": _names("""
        pandas pandas.api.extensions pandas.api.indexers pandas.api.types pandas.api.typing pandas.errors
        pandas.plotting pandas.testing pandas.tseries.offsets
    """),
    "psutil": _names("psutil"),
    "pyarrow": _names("pyarrow pyarrow.compute pyarrow.csv pyarrow.dataset pyarrow.json pyarrow.parquet"),
    "requests": _names("requests requests.auth requests.exceptions"),
    "safetensors": _names("safetensors safetensors.torch safetensors.numpy"),
    "sympy": _names("sympy sympy.combinatorics sympy.geometry sympy.matrices sympy.ntheory sympy.stats"),
    "tokenizers": _names("""
        tokenizers tokenizers.decoders tokenizers.models tokenizers.normalizers tokenizers.pre_tokenizers
        tokenizers.processors tokenizers.trainers
    """),
    "tqdm": _names("tqdm"),
    "yaml": _names("yaml"),
}

"""The extension of IPython in Python contexts.

It loads what most code imports, so that a sandbox that starts from memory has it; displays charts and tables as data;
and gives each execution its variables, and each sandbox its own random numbers.
"""

import os
import random
import socket
import sys

from IPython.core.formatters import BaseFormatter, catch_format_error
from traitlets import ObjectName, Unicode

from .charts import chart_of, plain, watch_boxes

MAX_CELLS = 100_000  # of a table as data


class Data(BaseFormatter):
    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict


class Chart(BaseFormatter):
    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    @catch_format_error
    def __call__(self, obj):
        # The inline backend takes figures out of all formatters' types whenever it is set up.
        figure = sys.modules["matplotlib.figure"].Figure
        return chart_of(obj) if isinstance(obj, figure) else super().__call__(obj)


def table(frame):
    if frame.size > MAX_CELLS:
        return None
    return {str(name): [plain(v) for v in frame.iloc[:, i]] for i, name in enumerate(frame.columns)}


class Session:
    """What an execution has from outside: variables, and the sandbox in which it runs."""

    def __init__(self, shell):
        self.shell = shell
        self.envs = {}
        self.saved = {}
        self.host = socket.gethostname()

    def before(self, _):
        request = self.shell.kernel.get_parent("shell")
        values = (request.get("metadata") or {}).get("barchan") or {}
        envs, env = values.get("envs", {}), values.get("env", {})
        if envs != self.envs:
            os.environ.update(envs)
            self.envs = envs
        self.saved = {name: os.environ.get(name) for name in env}
        os.environ.update(env)
        host = socket.gethostname()
        if host != self.host:  # claimed, or a fork: the state of generators is that of another sandbox
            self.host = host
            reseed()

    def after(self, _):
        for name, value in self.saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.saved = {}


def reseed():
    import numpy

    random.seed()
    numpy.random.seed()


def load_ipython_extension(shell):
    formatters = shell.display_formatter.formatters
    formatters["e2b/data"] = data = Data(parent=shell.display_formatter)
    formatters["e2b/chart"] = Chart(parent=shell.display_formatter)
    data.for_type_by_name("pandas.core.frame", "DataFrame", table)

    session = Session(shell)
    shell.events.register("pre_run_cell", session.before)
    shell.events.register("post_run_cell", session.after)

    preload(shell)


def preload(shell):
    shell.run_line_magic("matplotlib", "inline")
    import pandas
    from matplotlib import pyplot

    watch_boxes()
    # The first figure loads fonts, and the code of the backend.
    figure, axes = pyplot.subplots()
    axes.plot([1, 2], [1, 2], label="a")
    axes.legend()
    shell.display_formatter.format(figure)
    shell.display_formatter.format(pandas.DataFrame({"a": [1]}))
    pyplot.close(figure)

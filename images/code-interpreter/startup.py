"""What IPython's kernels begin with: tables and figures have their data beside their looks."""

import json


def _table(frame):
    try:
        return json.loads(frame.to_json(orient="list", date_format="iso"))
    except (AttributeError, ValueError):
        return frame.to_dict(orient="list")


def _chart(figure):
    from e2b_charts import chart_figure_to_dict

    return chart_figure_to_dict(figure)


def _begin():
    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    class Data(BaseFormatter):
        format_type = Unicode("e2b/data")
        print_method = ObjectName("_repr_e2b_data_")
        _return_type = dict

    class Chart(BaseFormatter):
        format_type = Unicode("e2b/chart")
        print_method = ObjectName("_repr_e2b_chart_")
        _return_type = (dict, str)

        # By class: matplotlib takes figures out of every formatter when it begins.
        def __call__(self, it):
            kind = type(it)
            if (kind.__module__, kind.__name__) != ("matplotlib.figure", "Figure"):
                return None
            try:
                return _chart(it)
            except Exception:
                # What has no known form is shown as an image alone.
                return None

    display = get_ipython().display_formatter
    data = Data(parent=display)
    data.for_type_by_name("pandas", "DataFrame", _table)
    data.for_type_by_name("pandas.core.frame", "DataFrame", _table)
    display.formatters["e2b/data"] = data
    display.formatters["e2b/chart"] = Chart(parent=display)


_begin()

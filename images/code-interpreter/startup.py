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

    display = get_ipython().display_formatter
    data, chart = Data(parent=display), Chart(parent=display)
    data.for_type_by_name("pandas", "DataFrame", _table)
    data.for_type_by_name("pandas.core.frame", "DataFrame", _table)
    chart.for_type_by_name("matplotlib.figure", "Figure", _chart)
    display.formatters["e2b/data"] = data
    display.formatters["e2b/chart"] = chart


_begin()

"""E2B's code interpreter for Python, unmodified."""

import asyncio
import base64

from e2b_code_interpreter import AsyncSandbox, Sandbox
from e2b import NotFoundException, SandboxException


def raises(kind, work, words=""):
    try:
        work()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
        return
    raise AssertionError(f"no {kind}")


def results(box):
    run = box.run_code
    assert run("x = 6").text is None
    done = run("x * 7")
    assert (done.text, done.error) == ("42", None) and done.execution_count == 2, done
    assert run("'text'").text == "text"
    seen = []
    done = run("import sys\nfor n in range(3): print(n)\nprint('err', file=sys.stderr)",
               on_stdout=lambda it: seen.append(it.line))
    assert "".join(done.logs.stdout) == "0\n1\n2\n" == "".join(seen), done
    assert "".join(done.logs.stderr) == "err\n"
    done = run("from IPython.display import HTML, display\ndisplay(HTML('<b>x</b>'))\n{'a': 1}")
    assert done.results[0].html == "<b>x</b>" and not done.results[0].is_main_result
    assert done.text == "{'a': 1}"
    done = run("import pandas\npandas.DataFrame({'a': [1, 2], 'b': ['x', 'y']})")
    assert done.results[0].data == {"a": [1, 2], "b": ["x", "y"]}, done.results[0].data
    assert "<table" in done.results[0].html
    assert run("import os; os.environ['SECRET']", envs={"SECRET": "of one call"}).text == "of one call"
    assert run("os.environ.get('SECRET')").text is None
    assert run("echo $((40 + 2))", language="bash").logs.stdout == ["42\n"]


def charts(box):
    done = box.run_code(
        "import matplotlib.pyplot as plt\n"
        "plt.bar(['a', 'b'], [1, 2]); plt.title('bars'); plt.xlabel('letters'); plt.show()"
    )
    [result] = done.results
    assert base64.b64decode(result.png).startswith(b"\x89PNG"), done.error
    assert result.chart.type.value == "bar" and result.chart.title == "bars", result.chart
    assert [(it.label, it.value) for it in result.chart.elements] == [("a", 1), ("b", 2)]


def errors(box):
    done = box.run_code("print('before')\n1 / 0")
    assert (done.error.name, done.error.value) == ("ZeroDivisionError", "division by zero")
    assert "ZeroDivisionError" in done.error.traceback and done.logs.stdout == ["before\n"]
    assert box.run_code("def").error.name == "SyntaxError"
    done = box.run_code("import os; os._exit(3)")
    assert done.error.name == "KernelDied", done
    assert box.run_code("1 + 1").text == "2"
    raises(SandboxException, lambda: box.run_code("1", language="cobol"), "cobol")


def contexts(box):
    box.run_code("mine = 1")
    context = box.create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert box.run_code("import os; os.getcwd()", context=context).text == "/tmp"
    assert box.run_code("mine", context=context).error.name == "NameError"
    assert context.id in [it.id for it in box.list_code_contexts()]
    box.run_code("kept = 1", context=context)
    box.restart_code_context(context)
    assert box.run_code("kept", context=context).error.name == "NameError"
    box.remove_code_context(context)
    raises(NotFoundException, lambda: box.run_code("1", context=context))
    assert box.run_code("mine").text == "1"


async def asynchronously():
    box = await AsyncSandbox.create(timeout=300)
    done = await asyncio.gather(*(box.run_code(f"{n} * 2") for n in range(4)))
    assert [it.text for it in done] == ["0", "2", "4", "6"]
    await box.kill()


with Sandbox.create(timeout=300) as own:
    for step in (results, charts, errors, contexts):
        step(own)
        print(step.__name__, flush=True)
asyncio.run(asynchronously())
print("async")

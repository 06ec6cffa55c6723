"""inspect_ai, unmodified: its own checks of a sandbox, and tasks of a mock model.

    check.py IMAGE
"""

import asyncio
import pathlib
import sys
import tempfile
import time

import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, includes, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

IMAGE = sys.argv[1]


async def checks() -> int:
    """All of inspect_ai's own, in one sandbox."""
    kind = registry_find_sandboxenv("exocell")
    config = kind.config_deserialize({"image": IMAGE, "memory_mb": 1024})
    await kind.task_init("checks", config)
    boxes = await kind.sample_init("checks", config, {})
    box = boxes["default"]
    try:
        told = await box.connection(user="daemon")
        assert told.type == "exocell" and " -u daemon " in told.command, told
        few = asyncio.Semaphore(4)

        async def check(name: str) -> None:
            async with few:
                await getattr(self_check, name)(box)

        # test_cwd_unspecified and the others have files of their own.
        await asyncio.gather(*map(check, self_check.__all__))
        await loses_nothing(box)
    finally:
        await kind.sample_cleanup("checks", config, boxes, False)
    try:
        await box.connection()
        raise AssertionError("a cell that was removed has a connection")
    except ConnectionError:
        pass
    return len(self_check.__all__)


async def loses_nothing(box):
    """What a late command wrote is told, and a cancelled one is killed."""
    try:
        await box.exec(["sh", "-c", "echo so far; sleep 1001"], timeout=2)
        raise AssertionError("no timeout")
    except TimeoutError as error:
        assert error.truncated_output == "so far\n", error.truncated_output
    work = asyncio.ensure_future(box.exec(["sleep", "1002"]))
    await asyncio.sleep(1)
    work.cancel()
    until = time.monotonic() + 60
    while "sleep 100" in (told := (await box.exec(["ps", "-A", "-o", "args"])).stdout):
        assert time.monotonic() < until, told


@scorer(metrics=[accuracy()])
def wrote(path: str, content: str):
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value="C" if await sandbox().read_file(path) == content else "I")

    return score


def task(folder: pathlib.Path) -> Task:
    """A model that uses bash twice, in an image of a Dockerfile."""
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nWORKDIR /work\nENV GREETING=hello\n")
    (folder / "exocell.toml").write_text('dockerfile = "Dockerfile"\nmemory_mb = 512\n')
    outputs = [
        ModelOutput.for_tool_call("m", "bash", {"command": "ls; echo $GREETING > said"}),
        ModelOutput.for_tool_call("m", "bash", {"command": "cat given"}),
        ModelOutput.from_content("m", "the answer is 42"),
    ]
    for output in outputs:
        # Else the model fetches a tokenizer to count with.
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    model = get_model("mockllm/model", custom_outputs=outputs * 2)
    samples = [Sample(input="go", target="42", files={"given": f"file {n}"}) for n in (1, 2)]
    spec = SandboxEnvironmentSpec("exocell", str(folder / "exocell.toml"))
    return Task(
        dataset=samples,
        solver=[use_tools(bash(timeout=60)), generate()],
        scorer=[includes(), wrote("said", "hello\n")],
        model=model,
        sandbox=spec,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        (log,) = inspect_ai.eval(
            task(folder), log_dir=str(folder / "logs"), display="none", max_samples=1
        )
        assert log.status == "success", log.error and log.error.message
        means = [score.metrics["accuracy"].value for score in log.results.scores]
        tools = [m.text for s in log.samples for m in s.messages if m.role == "tool"]
        assert means == [1.0, 1.0], (means, tools)
        assert any("file 1" in text for text in tools) and any("file 2" in text for text in tools)
        try:
            kind = registry_find_sandboxenv("exocell")
            asyncio.run(kind.task_init("t", str(folder / "compose.yaml")))
            raise AssertionError("a compose file was taken")
        except ValueError as error:
            assert "exocell serve --docker" in str(error), error
    print(f"{asyncio.run(checks())} checks, 2 samples")


if __name__ == "__main__":
    main()

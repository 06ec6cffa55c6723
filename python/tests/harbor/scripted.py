"""An agent that does what it is told here, and says what came of it."""

from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

FETCH = 'python3 -c \'import os, urllib.request; print(urllib.request.urlopen(os.environ["PAGE"]).read().decode())\''
#: By what a task's instruction has; each step's exit code is told, too.
STEPS = {
    "/app/stats.py": [
        ("python3 -m unittest", 1),
        ("sed -i 's/^    numbers.sort()$/    numbers = sorted(numbers)/' stats.py", 0),
        ("sed -i 's|^    return.*|    n = len(numbers); "
         "return (numbers[(n - 1) // 2] + numbers[n // 2]) / 2|' stats.py", 0),
        ("python3 -m unittest", 0),
    ],
    # This one is wrong: it counts lines.
    "$TEXT": [("sort \"$TEXT\" | uniq -c > top.txt", 0)],
    "/report/devices": [
        ("touch /report/devices; for d in /sys/class/net/*; do "
         "[ ${d##*/} = lo ] || echo ${d##*/} >> /report/devices; done", 0),
        ("timeout 5 bash -c ': > /dev/tcp/1.1.1.1/80'", 1),
        ("echo no > /report/reached", 0),
    ],
    "/app/page": [
        (f"{FETCH} > page", 0),
        ("python3 -c 'import urllib.request; urllib.request.urlopen(\"http://example.org/\")'", 1),
        ("printf refused > other", 0),
    ],
    "/srv/shop/prices.csv": [
        ("tail -n +2 prices.csv | cut -d, -f2 | paste -sd+ | python3 -c 'print(eval(input()))' > total", 0),
        (f"id -un | tee who; {FETCH} > page", 0),
    ],
}


class Scripted(BaseAgent):
    @staticmethod
    def name() -> str:
        return "scripted"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        await environment.exec("true", timeout_sec=60)

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        steps = next(steps for word, steps in STEPS.items() if word in instruction)
        told: list[dict[str, Any]] = []
        for command, wanted in steps:
            result = await environment.exec(command, timeout_sec=60)
            told.append({"command": command, "code": result.return_code, "err": result.stderr})
            if result.return_code != wanted:
                raise RuntimeError(f"{told}")
        context.metadata = {"steps": told}

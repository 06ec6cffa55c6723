"""mini-swe-agent, unmodified, with a model that says what it is told to say.

    mini.py IMAGE [CONFIGURATION]
"""

import pathlib
import sys

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel, make_output

TESTS = """
import unittest
from work import double
class Doubles(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)
"""
STEPS = [
    f"mkdir -p /job && cd /job && echo '{TESTS}' > test_work.py && "
    "printf 'def double(n):\\n    return n\\n' > work.py && python3 -m unittest",
    "cd /job && sed -i 's/return n/return 2 * n/' work.py && python3 -m unittest",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat /job/work.py",
]

told = {"environment_class": "docker", "run_args": ["--rm", "--network", "none"]}
if sys.argv[2:]:
    told = yaml.safe_load(pathlib.Path(sys.argv[2]).read_text())["environment"]
environment = get_environment({**told, "image": sys.argv[1], "timeout": 300})
model = DeterministicModel(outputs=[make_output("next", [{"command": step}]) for step in STEPS])
agent = DefaultAgent(model, environment, system_template="s", instance_template="{{task}}", cost_limit=0)
try:
    ended = agent.run("double what is given")
finally:
    environment.cleanup()
seen = [message["content"] for message in agent.messages]
assert any("FAILED (failures=1)" in text and "<returncode>1" in text for text in seen), seen
assert any("\nOK" in text and "<returncode>0" in text for text in seen), seen
print(ended["exit_status"])
print(ended["submission"].strip())

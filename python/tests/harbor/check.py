"""Harbor's command, unmodified, on the tasks beside this file: ``check.py IMAGE``.

Oracle and a scripted agent, with and without a network. Prints what each was
rewarded with. What a task may reach is a server of this file's own.
"""

import collections
import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

import direct

HERE = pathlib.Path(__file__).resolve().parent
REWARDS = {
    "oracle": dict.fromkeys(
        ["count-words", "fetch-one", "fix-median", "no-way-out", "two-users"], 1.0
    ),
    "scripted": {
        "count-words": 0.0,
        "fetch-one": 1.0,
        "fix-median": 1.0,
        "no-way-out": 1.0,
        "two-users": 1.0,
    },
}


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"the page of the host"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def harbor(folder: pathlib.Path, page: str) -> subprocess.CompletedProcess[str]:
    config = {
        "job_name": "job",
        "jobs_dir": str(folder),
        "n_concurrent_trials": 2,
        "quiet": True,
        "environment": {
            "import_path": "exocell.harbor:ExocellEnvironment",
            "kwargs": {"host": True},
        },
        "agents": [{"name": "oracle"}, {"import_path": "scripted:Scripted"}],
        "datasets": [{"path": str(HERE / "tasks")}],
    }
    told = folder / "config.json"
    told.write_text(json.dumps(config))
    environment = {
        **os.environ,
        "EXOCELL_TEST_PAGE": page,
        "HARBOR_TELEMETRY": "0",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    words = [sys.executable, "-m", "harbor.cli.main", "run", "-c", str(told), "-y"]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


def main() -> None:
    direct.check(sys.argv[1])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        page = f"http://host.docker.internal:{server.server_port}/"
        ran = harbor(pathlib.Path(folder), page)
        rewards: dict[str, dict[str, float]] = collections.defaultdict(dict)
        errors: list[str] = []
        for path in pathlib.Path(folder).glob("job/*/result.json"):
            trial = json.loads(path.read_text())
            task = trial["task_name"].removeprefix("exocell/")
            told = trial["verifier_result"] or {"rewards": {}}
            rewards[trial["agent_info"]["name"]][task] = told["rewards"].get("reward")
            if trial["exception_info"]:
                errors.append(f"{task}: {trial['exception_info']['exception_traceback']}")
        if rewards != REWARDS:
            sys.exit("\n".join([*errors, str(dict(rewards)), ran.stdout, ran.stderr]))
        kept = list(pathlib.Path(folder).glob("job/two-users*/artifacts/srv/shop/total"))
        assert [path.read_text() for path in kept] == ["12\n"] * 2, kept
    print("oracle 5 of 5, scripted 4 of 5")


if __name__ == "__main__":
    main()

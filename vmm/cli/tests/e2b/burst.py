"""Many sandboxes at once by E2B's SDK for Python, unmodified: none is lost, and another key's one
does not wait for them.

burst.py COUNT KEY OTHER_KEY
"""

import sys
import threading
import time

from e2b import RateLimitException, Sandbox

COUNT, KEY, OTHER = int(sys.argv[1]), sys.argv[2], sys.argv[3]
METADATA = {"kind": "burst"}

lock = threading.Lock()
made = []  # ids of KEY's, in the order in which they came
failed = []
asked_at = served_at = None


def create():
    while True:
        try:
            box = Sandbox.create("small", api_key=KEY, timeout=600, metadata=METADATA, request_timeout=120)
        except RateLimitException:
            # As it is told to.
            time.sleep(5)
            continue
        except Exception as error:  # noqa: BLE001 - all are told of
            with lock:
                failed.append(repr(error))
            return
        with lock:
            made.append(box.sandbox_id)
        return


threads = [threading.Thread(target=create) for _ in range(COUNT)]
for thread in threads:
    thread.start()
while len(made) < COUNT // 10 and not failed:
    time.sleep(0.02)
asked_at = len(made)
other = Sandbox.create("small", api_key=OTHER, timeout=600, request_timeout=120)
served_at = len(made)
for thread in threads:
    thread.join()
assert not failed, failed
assert len(set(made)) == COUNT, len(set(made))
print(f"served after {served_at - asked_at} of {COUNT - asked_at}", file=sys.stderr)
# In one line for all it would come last. How many come while it boots, and while its client builds
# its request, is the machine's to say; whose turn is next has unit tests (exocell-e2b, `queue`).
assert served_at <= COUNT * 3 // 4, (asked_at, served_at)

listed, pages = [], Sandbox.list(api_key=KEY, limit=100)
while pages.has_next:
    listed += [it.sandbox_id for it in pages.next_items()]
assert sorted(listed) == sorted(made), (len(listed), len(made))
first = Sandbox.connect(made[0], api_key=KEY)
assert first.commands.run("echo here").stdout == "here\n"
assert other.commands.run("echo there").stdout == "there\n"

ending = [threading.Thread(target=Sandbox.kill, args=(it,), kwargs={"api_key": KEY}) for it in made]
for thread in ending:
    thread.start()
for thread in ending:
    thread.join()
assert other.kill()
print("served")
